"""The test harness: stand-ins, real services on private ports, faults to inject, and a reader that trusts nobody.

fake_server   a stand-in for one SGLang process, with faults that are switched while it runs
services      Valkey, SeaweedFS, TLS and fake servers, each checked to be the one that was started here
proxy         a TCP proxy and an S3 proxy that misbehave on request
daemon        the real `gend up` in its own session: start, look, kill, clean up
lone          a box without a daemon: workers that are forked, so that a wrapper can end one at any step
reader        counts rows with its own code, without a single import from gend
processes     ports without races between test processes; finding and ending what a test started
"""
