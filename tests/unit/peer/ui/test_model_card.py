"""The card of an exported model: what it says, that the hub's library reads it, and that nobody's text is more than
text in it."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from peer.ui.model_card import CARD, MOST_CONTRIBUTORS, MOST_POINTS, PICTURE, Card, History
from protocol.identity import Identity, short_peer
from protocol.run import layout
from protocol.run.manifest import DataSpec, Manifest
from protocol.wire.claims import Evaluation
from protocol.wire.decree import CLOSE
from tests.support import tiny
from tests.support.access import decree, signed

ADA, BOB = (Identity(bytes([1, i] * 16)).peer_id for i in range(2))
HOSTILE = '<img src=x>|**b** [a](http://b.c) `q`\\ # & "y" www.d.e @f'


def evaluation(peer: str, round: int, loss: float) -> Evaluation:
    return Evaluation(peer=peer, round=round, sequences=8, loss=loss, bits_per_byte=loss / 2, signature=b"")


def history(manifest: Manifest, rounds: int = 3, until: int | None = None, peers: int = 2) -> History:
    """Of rounds in which ADA trains 64 tokens and BOB 32, with losses 9, 8, ...; further `peers` train one token."""
    found, before = History(manifest, until), None
    others = [Identity(bytes([2, i] * 16)).peer_id for i in range(peers - 2)]
    for round in range(rounds + 1):
        work = [(ADA, 64), (BOB, 32), *((other, 1) for other in others)] if round else []
        done = tuple(
            tiny.contribution(number, peer, tokens=tokens, loss=10.0 - round)
            for number, (peer, tokens) in enumerate(work)
        )
        measured = tuple(evaluation(peer, round - 1, 9.5 - round) for peer in (ADA, BOB)) if round > 1 else ()
        before = tiny.commit(manifest, before, time=86400.0 * round, contributions=done, evaluations=measured)
        found.add(before)
    return found


def card(manifest: Manifest | None = None, told: History | None = None, **changes: Any) -> Card:
    of = manifest or tiny.manifest()
    values: dict[str, Any] = {
        "manifest": of,
        "round": 3,
        "state": "ab" * 32,
        "is_checked": True,
        "address": "",
        "licence": "apache-2.0",
        "history": told,
    }
    return Card(**{**values, **changes})


def text(made: Card) -> str:
    return made.files()[CARD].decode()


def test_the_hubs_library_reads_it() -> None:
    manifest = tiny.manifest()
    found = ModelCard(text(card(manifest, history(manifest))), ignore_metadata_errors=False)
    assert found.data.to_dict() == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["potluck", "distributed-training", "base-model", "llama"],
    }


def test_it_says_what_the_log_says() -> None:
    manifest = tiny.manifest(name="words")
    told = history(manifest)
    told.names.learn(ADA, "Ada")
    said = text(card(manifest, told, address="/ip4/203.0.113.5/tcp/1/p2p/x#y"))
    assert "# words\n" in said
    assert "**It is a base model**" in said
    assert "| tokens | 288 |" in said
    assert "| trained | 1970-01-02 to 1970-01-04 |" in said
    assert "| training loss | 7.0000 nats per token in round 3 |" in said
    assert "| on held-out text | 6.5000 nats per token, 3.2500 bits per byte after round 2 |" in said
    ranks = [line for line in said.splitlines() if re.match(r"\| \d", line)]
    assert ranks == [
        f"| 1 | Ada·{ADA[-4:]} | `{short_peer(ADA)}` | 192 | 66.7% | 3 |",
        f"| 2 |  | `{short_peer(BOB)}` | 96 | 33.3% | 3 |",
    ]
    assert manifest.run_id in said
    assert "ab" * 32 in said
    assert "what it was made of: unknown" in said
    assert "    potluck log verify /ip4/203.0.113.5/tcp/1/p2p/x#y\n" in said
    assert "ADDRESS" not in said


def test_what_came_after_its_round_is_not_of_it() -> None:
    manifest = tiny.manifest()
    said = text(card(manifest, history(manifest, until=2), round=2))
    assert "| tokens | 192 |" in said
    assert "| training loss | 8.0000 nats per token in round 2 |" in said
    assert "| on held-out text | 6.5000 nats per token, 3.2500 bits per byte after round 2 |" in said


def test_without_a_log_it_says_what_is_known_there() -> None:
    made = card(told=None, is_checked=False, licence="unknown")
    assert set(made.files()) == {CARD}
    said = text(made)
    assert "unknown: the card was made without the run's log" in said
    assert "no log has confirmed it" in said
    assert "Who trained it" not in said
    assert PICTURE not in said
    assert "    potluck log verify ADDRESS\n" in said


def test_of_many_it_names_those_with_the_most() -> None:
    manifest = tiny.manifest()
    said = text(card(manifest, history(manifest, peers=MOST_CONTRIBUTORS + 7)))
    assert f"{MOST_CONTRIBUTORS + 7} peers trained" in said
    assert len(re.findall(r"^\| \d+ \|", said, re.MULTILINE)) == MOST_CONTRIBUTORS
    assert "And 7 others with 21 tokens." in said


def test_foreign_text_is_only_text() -> None:
    mirror = "https://a.example/<b>|`*[x](y)"
    manifest = tiny.manifest(name=HOSTILE, data=DataSpec(corpus="0" * 64, mirrors=(mirror,)))
    made = card(manifest, history(manifest))
    whole = ModelCard(text(made), ignore_metadata_errors=False)
    assert whole.data.to_dict() == ModelCard(text(card(told=history(manifest)))).data.to_dict()
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(whole.text)
    plain = MarkdownIt("commonmark", {"html": True}).enable("table").render(ModelCard(text(card(told=None))).text)
    assert set(re.findall(r"<\w+", page)) <= set(re.findall(r"<\w+", plain)) | {"<img"}
    assert re.findall(r"<img[^>]*>", page) == [f'<img src="{PICTURE}" alt="Loss and bits per byte by round" />']
    assert "<a" not in page
    title = re.findall("<h1>(.*)</h1>", page)
    assert title == [HOSTILE.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")]
    assert HOSTILE not in made.files()[PICTURE].decode()


def test_the_picture_has_the_losses() -> None:
    manifest = tiny.manifest()
    root = ElementTree.fromstring(card(manifest, history(manifest)).files()[PICTURE])
    space = "{http://www.w3.org/2000/svg}"
    lines = [line.attrib["points"].split() for line in root.iter(f"{space}polyline")]
    assert [len(points) for points in lines] == [3, 2, 2]
    heights = [float(point.split(",")[1]) for point in lines[0]]
    assert heights == sorted(heights), "a lower loss is drawn lower"
    words = {text.text for text in root.iter(f"{space}text")}
    assert {"loss, nats per token", "bits per byte, held-out text", "training", "held-out", "9", "7"} <= words
    for point in (float(number) for line in lines for pair in line for number in pair.split(",")):
        assert 0 <= point <= 400


def test_the_picture_of_a_long_run_is_small() -> None:
    manifest = tiny.manifest()
    told = history(manifest)
    told.losses = [(float(round), 9.0 - round / 9000) for round in range(9000)]
    shown = card(manifest, told).files()[PICTURE]
    root = ElementTree.fromstring(shown)
    first = next(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(first.attrib["points"].split()) == MOST_POINTS
    assert len(shown) < 20_000


@pytest.mark.parametrize("losses", [[(1.0, 5.0)], [(1.0, 5.0), (2.0, 5.0)], []])
def test_few_losses_have_a_picture_or_none(losses: list[tuple[float, float]]) -> None:
    told = History(tiny.manifest())
    told.losses = losses
    shown = card(told=told).picture()
    assert bool(shown) == bool(losses)
    if shown:
        ElementTree.fromstring(shown)
        assert "nan" not in shown


def test_a_decree_that_closes_a_run_is_heard_though_the_model_is_of_an_earlier_round() -> None:
    told = history(tiny.manifest(), until=2)
    assert told.is_open
    told.add(tiny.commit(tiny.manifest(), round=4, time=1e6, decrees=1, decree=signed(decree(CLOSE), tiny.OPERATOR)))
    assert not told.is_open


def test_it_says_which_weights_the_run_went_on_from() -> None:
    new = tiny.manifest()
    digests = {shard: tiny.digest(shard) for shard in layout.shard_names(new.model)}
    said = text(card(tiny.manifest(initial_state=tuple(digests.values()))))
    assert (
        f"A language model that went on from weights (state `{layout.state_digest(new.model, digests)}`) with" in said
    )
    assert "reproduces its model from those weights." in said
    assert "was pre-trained from scratch with Potluck" in text(card(new))
    assert "reproduces its model from its seed." in text(card(new))
