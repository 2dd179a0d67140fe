"""How a server is started: seats, command line, environment."""

import sys

import pytest

from gend.config import Settings, settings_from
from gend.errors import SettingsError
from gend.server_command import PORTS_PER_SERVER, Seat, argv, environment, seats


def settings(**servers: object) -> Settings:
    return settings_from({"model": {"path": "m"}, "servers": {"base_port": 30000, **servers}}, "test")


@pytest.mark.parametrize(
    ("servers", "visible", "groups"),
    [
        ({}, 8, [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]),
        ({"gpus_per_server": 4}, 8, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ({"gpus": [2, 0]}, 8, [(2,), (0,)]),
        ({"gpus": [0, 1], "count": 1}, 8, [(0,)]),
        ({"count": 2}, 0, [(), ()]),
        ({"gpus": [], "count": 1}, 0, [()]),
    ],
)
def test_a_seat_for_each_server(servers: dict[str, object], visible: int, groups: list[tuple[int, ...]]) -> None:
    places = seats(settings(**servers), visible)
    assert [place.gpus for place in places] == groups
    assert [place.port for place in places] == [30000 + PORTS_PER_SERVER * n for n in range(len(groups))]


@pytest.mark.parametrize(
    ("servers", "visible", "message"),
    [
        ({}, 0, "no GPU is visible here and servers.count is 0"),
        ({"gpus": [0, 0]}, 8, "each GPU once"),
        ({"gpus": [-1]}, 8, "counted from 0"),
        ({"gpus_per_server": 3}, 8, "8 GPUs cannot be shared out in groups of 3"),
        ({"count": 2, "base_port": 65000}, 0, "choose a lower one"),
        ({"gpus": [0, 9]}, 8, "only 8 GPUs are visible here"),
    ],
)
def test_seats_that_do_not_fit(servers: dict[str, object], visible: int, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        seats(settings(**servers), visible)


def test_command_line() -> None:
    seat = Seat(number=1, gpus=(2, 3), port=30010)
    plain = argv(settings(), seat)
    assert plain[:3] == [sys.executable, "-m", "sglang.launch_server"], "python is the one that gend runs in"
    assert plain[3:9] == ["--model-path", "m", "--host", "127.0.0.1", "--port", "30010"]

    flags = {"mem_fraction_static": 0.9, "--disable-radix-cache": True, "enable-x": False, "cuda-graph-bs": ["1", "2"]}
    line = argv(settings(command=["serve"], flags=flags, gpus_per_server=2), seat)
    assert " ".join(line) == (
        "serve --model-path m --host 127.0.0.1 --port 30010 --tp-size 2 "
        "--mem-fraction-static 0.9 --disable-radix-cache --cuda-graph-bs 1 2"
    )
    assert argv(settings(command=["serve"], flags={"model-path": "other"}), seat)[1:3] == ["--model-path", "other"]


def test_environment_has_its_gpus_and_none_of_the_stores_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("HF_HOME", "/ours")
    made = environment(settings(environment={"HF_HOME": "/models"}), Seat(number=0, gpus=(4, 5), port=30000))
    assert made["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert made["HF_HOME"] == "/models"
    assert not [name for name in made if name.startswith("AWS_")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    without = environment(settings(), Seat(number=0, gpus=(), port=30000))
    assert without["CUDA_VISIBLE_DEVICES"] == "7", "no GPUs of its own: nothing is hidden from it"
