"""Which prompt killed the server? Pure: what is known of suspects, and what a crash adds to it.

When a server dies, every prompt that was in flight at it becomes a suspect. Suspects are tried again in smaller and
smaller company, while all other prompts go on as before:

| stage | reached when a crash left   | tried again                                                    |
|-------|-----------------------------|----------------------------------------------------------------|
| 1     | more than 32 suspects       | at most 32 at a time at each server                            |
| 2     | 5 to 32 suspects            | at most 4 at a time, at one server of the box                  |
| 3     | 4 suspects or fewer         | alone, at one server of the box: nothing else is in flight     |

A suspect that comes to its end is cleared. Each further crash accuses only the suspects that were in flight, if there
were any, and clears those of the same stage that were not. A prompt that kills a server twice while alone is poison:
it becomes a row that says so. Out of 256 in flight it is found with 5 crashes, which share 256, 32, 4, 1 and 1.
"""

from collections.abc import Collection, Mapping

import msgspec

AT_A_SERVER = 32
IN_THE_LANE = 4
DEADLY = 2
"""So many crashes while alone make a prompt poison: one may be a coincidence."""


class Suspicion(msgspec.Struct, frozen=True):
    """What is known of one suspect: how it is to be tried, and how often a server died with it alone."""

    stage: int
    alone: int = 0

    @property
    def poison(self) -> bool:
        return self.alone >= DEADLY


def suspect_key(run: str, prompt: str) -> str:
    """The name of a suspect."""
    return f"{run}/{prompt}"


def accuse(in_flight: Collection[str], known: Mapping[str, Suspicion]) -> tuple[dict[str, Suspicion], list[str]]:
    """What a crash with these prompts in flight shows: new suspicions, and suspects that it clears."""
    group = [key for key in in_flight if key in known] or list(in_flight)
    stage = 1 if len(group) > AT_A_SERVER else 2 if len(group) > IN_THE_LANE else 3
    alone = len(in_flight) == 1
    accused = {key: Suspicion(stage, (known[key].alone if key in known else 0) + alone) for key in group}
    stages = {known[key].stage for key in group if key in known}
    cleared = [key for key, suspicion in known.items() if suspicion.stage in stages and key not in accused]
    return accused, cleared
