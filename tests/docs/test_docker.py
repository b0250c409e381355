"""What the Dockerfiles, docker/compose.yaml and docs/guides/docker.md say agrees with each other and with the program.
No engine is needed. The health checks are run against a real node and a real peer in tests/e2e/test_service.py."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
import yaml
from typer.core import TyperGroup

from peer.cli.main import app
from peer.cli.running import ALIVE, TOUCH_SECONDS
from tests.support.images import FOLDER, IMAGES, KINDS, Image
from tests.support.tiny import OPERATOR

ROOT = FOLDER.parent
GUIDE = (ROOT / "docs" / "guides" / "docker.md").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
LINE = f"/ip4/203.0.113.5/tcp/31337/p2p/{OPERATOR.peer_id}#{'0' * 64}"


def can_be_typed(words: list[str]) -> dict[str, Any]:
    """What the program reads in `potluck …`; it must understand all of it."""
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    assert words[0] == "potluck"
    return command.commands[words[1]].make_context(words[1], words[2:]).params


def filled_in(text: str) -> str:
    """What compose makes of a text where no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text).replace("$$", "$")


def mounts(service: str) -> dict[str, str]:
    """Its volumes or folders by where they are in the container."""
    words = [filled_in(volume).split(":") for volume in SERVICES[service]["volumes"]]
    return {where: what for what, where, *_ in words}


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_built_from_the_checkout_and_run_without_privileges(kind: str) -> None:
    image = IMAGES[kind]
    kinds = [word for word, _ in image.lines]
    copied = [source for rest in image.all("COPY") for source in rest.split()[:-1]]
    for source in copied:
        assert (ROOT / source).exists(), source
    assert {"protocol", "peer", "bootstrap"} <= set(copied)
    assert image.one("USER") not in ("root", "0")
    last_root_work = max(i for i, word in enumerate(kinds) if word in ("RUN", "COPY"))
    assert last_root_work < kinds.index("USER") < kinds.index("ENTRYPOINT")
    given = json.loads(image.one("CMD")) if image.all("CMD") else [LINE]
    folder = can_be_typed([*image.entry, *given])["dir"]
    assert folder == Path(image.folder)
    assert folder.is_relative_to(image.one("VOLUME"))


def test_both_images_have_the_same_layers() -> None:
    """So that the second one takes no room."""
    layers = [[line for line in image.lines if line[0] in ("FROM", "COPY", "RUN", "ARG")] for image in IMAGES.values()]
    assert layers[0] == layers[1]


def test_engines_are_sent_what_is_copied_and_no_more() -> None:
    """A run's folder next to the checkout has keys."""
    lines = [line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    assert lines[0] == "*"
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert kept == {source for image in IMAGES.values() for rest in image.all("COPY") for source in rest.split()[:-1]}


@pytest.mark.parametrize("kind", KINDS)
def test_the_health_check_looks_at_the_folder_of_the_process(kind: str, tmp_path: Path) -> None:
    image = IMAGES[kind]
    assert f"{image.folder}/{ALIVE} " in image.check
    assert not image.is_healthy(tmp_path), "before the process begins"
    (tmp_path / ALIVE).touch()
    assert image.is_healthy(tmp_path)
    image.age(tmp_path)
    assert not image.is_healthy(tmp_path)
    seconds = dict(re.findall(r"--(\w+)=(\d+)s", image.one("HEALTHCHECK")))
    assert int(seconds["interval"]) >= 30, "cheap"
    assert "-mmin -1 " in image.check
    assert 4 * TOUCH_SECONDS < 60, "a late touch is no death"
    assert not re.search("python|potluck", image.check), "cheap"


def test_compose_starts_a_node_and_peers_whose_commands_the_program_understands() -> None:
    peers = [name for name in SERVICES if SERVICES[name]["image"] == "potluck-peer"]
    assert len(peers) >= 2
    for name in (*peers, "bootstrap"):
        image = image_of(name)
        words = [*image.entry, *map(filled_in, SERVICES[name]["command"])]
        assert not {"entrypoint", "healthcheck", "user"} & set(SERVICES[name])
        assert can_be_typed(words)["dir"] == Path(image.folder)
    built = {service["build"]["dockerfile"]: service["image"] for service in SERVICES.values() if "build" in service}
    assert built == {f"docker/{kind}.Dockerfile": f"potluck-{kind}" for kind in KINDS}
    assert len(built) == sum("build" in service for service in SERVICES.values()), "each is built once"
    assert len({mounts(name)["/data"] for name in peers}) == len(peers), "each has a key of its own"
    assert mounts("run") == {"/data/run": "run", "/join": "join"}
    assert mounts("bootstrap")["/data/run"] == "run"
    named = [what for name in SERVICES for what in mounts(name).values()]
    assert set(named) == set(COMPOSE["volumes"])
    for where in (where for name in SERVICES for where in mounts(name)):
        for image in IMAGES.values():
            assert where in image.all("RUN")[-1], f"{where} would belong to root"


def image_of(service: str) -> Image:
    return IMAGES[SERVICES[service]["image"].removeprefix("potluck-")]


def test_the_guide_names_what_is_there() -> None:
    """Its commands: the files, images, services, folders and variables, and what follows an image's name."""
    found = 0
    for line in re.findall(r"^ {4}((?:[A-Z_]+=\S+ )*docker .*)$", GUIDE, re.MULTILINE):
        words = shlex.split(line)
        variables = [words.pop(0).partition("=")[0] for _ in range(words.index("docker"))]
        build = [*COMPOSE["x-build"]["args"]]
        match words[1:]:
            case ["build", *rest]:
                kind = rest[rest.index("-t") + 1].removeprefix("potluck-")
                assert rest[rest.index("-f") + 1] == f"docker/{kind}.Dockerfile"
                given = [word.partition("=")[0] for word in rest if word.startswith("PIP_")]
                assert set(given) <= {*IMAGES[kind].all("ARG"), *build}
                assert rest[-1] == ".", "from the checkout"
            case ["compose", "-f", "docker/compose.yaml", verb, *rest]:
                assert {name for name in variables if not name.startswith("PIP_")} <= set(used_variables())
                assert {name for name in variables if name.startswith("PIP_")} <= set(build)
                if verb == "exec":
                    assert rest[0] in SERVICES
                    assert can_be_typed(rest[1:])["run"] in [SERVICES[rest[0]]["command"][0]]
            case ["run", *rest]:
                at = next(i for i, word in enumerate(rest) if word.startswith("potluck-"))
                image = IMAGES[rest[at].removeprefix("potluck-")]
                more = [LINE if word == "LINE" else word for word in rest[at + 1 :]]
                read = can_be_typed([*image.entry, *more])
                assert read["dir"] == Path(image.folder)
                mounted = rest[rest.index("-v") + 1].split(":")[1]
                assert read["dir"].is_relative_to(mounted)
                ports = [rest[i + 1].split(":")[1] for i, word in enumerate(rest) if word == "-p"]
                assert ports in ([], [str(read["port"])]), line
                if image.kind == "peer":
                    assert "--stop-timeout" in rest, "it gives what it has learned to others first"
            case ["logs", *_]:
                pass
            case _:
                raise AssertionError(line)
        found += 1
    assert found > 10
    for where in ("/data", "/data/run", "/data/peer"):
        assert f"`{where}`" in GUIDE
    assert f"`{ALIVE}`" in GUIDE


def used_variables() -> list[str]:
    return re.findall(r"\$\{(\w+):-", (FOLDER / "compose.yaml").read_text(encoding="utf-8"))


def test_what_the_guide_adds_for_a_gpu_is_for_a_peer_of_compose() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    (name,) = yaml.safe_load(block)["services"]
    assert SERVICES[name]["image"] == "potluck-peer"
