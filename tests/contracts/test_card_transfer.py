"""What trainer and generators say to each other when vLLM carries the weights."""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import InvalidToken

from areal_flow.cluster.generator_tasks import weights_carrier
from areal_flow.cluster.trainer_tasks import require_carrier
from areal_flow.config import Recipe, build_recipe
from areal_flow.errors import ConfigError, WeightsError
from areal_flow.weights.broadcast import KEY_BYTES, CardReader
from areal_flow.weights.card_transfer import CardTransfer, StoreClient
from areal_flow.weights.gloo import serve_store
from areal_flow.weights.settings import carrier_of

KEY = bytes(KEY_BYTES)


@pytest.fixture
def store() -> Any:
    return serve_store("127.0.0.1")[0]


def test_generators_are_told_what_is_sent_and_waited_for(store: Any) -> None:
    client = StoreClient(store, "group-0", KEY, "nccl", 2, num_workers=4, content_hash="hash")
    client.init_weight_transfer_engine({"rank_offset": 1, "world_size": 9})
    client.update_weights({"names": ["a"]})
    for transfer in [CardTransfer(store, "group-0", rank, KEY) for rank in (1, 2)]:
        told = pickle.loads(transfer.message("init"))
        assert told == ("nccl", {"rank_offset": 1, "world_size": 9})
        assert pickle.loads(transfer.message("update")) == ("hash", {"names": ["a"]})
        transfer.finish()
    client.finish_weight_update()


def test_message_without_the_key_is_never_unpickled(store: Any) -> None:
    StoreClient(store, "group-0", KEY, "ipc", 1, 1).init_weight_transfer_engine({})
    plain = pickle.dumps(("ipc", {}))
    assert plain not in store.get("group-0/init")
    with pytest.raises(InvalidToken):
        CardTransfer(store, "group-0", 1, b"1" * KEY_BYTES).message("init")
    store.set("group-0/init", plain * 3)
    with pytest.raises(InvalidToken):
        CardTransfer(store, "group-0", 1, KEY).message("init")


def test_who_says_nothing_is_waited_for_in_bounds(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_flow.weights.card_transfer.TRANSFER_TIMEOUT_S", 0.1)
    store.set_timeout(timedelta(seconds=60))
    with pytest.raises(RuntimeError):
        CardTransfer(store, "group-0", 1, KEY).message("update", timeout_s=0.1)
    with pytest.raises(RuntimeError):
        StoreClient(store, "group-0", KEY, "ipc", 1, 1).finish_weight_update()


def test_version_that_was_not_published_is_refused(tmp_path: Path) -> None:
    reader = CardReader(tmp_path, "127.0.0.1", "nccl", 1)
    with pytest.raises(WeightsError, match="version 3 was not published"):
        reader.load_with_hash(3)


@pytest.mark.parametrize(
    ("device", "shares_card", "carrier"),
    [
        ("cpu", False, "gloo"),
        ("cpu", True, "gloo"),
        ("cuda", False, "nccl"),
        ("cuda", True, "ipc"),
    ],
)
def test_carrier_follows_from_device_and_cards(
    device: str, shares_card: bool, carrier: str
) -> None:
    assert carrier_of(device, shares_card=shares_card) == carrier


@pytest.mark.parametrize(
    ("changed", "carrier"),
    [
        ({}, "nccl"),
        ({"cluster": {"num_gpus": 1}}, "ipc"),
        ({"cluster": {"num_gpus": 2}}, "nccl"),
        ({"generation": {"interruption": "drain"}}, "gloo"),
        ({"generation": {"engine": "torch"}}, "gloo"),
        ({"generation": {"device": "cpu"}}, "gloo"),
        ({"trainer": {"device": "cpu"}}, "gloo"),
    ],
    ids=str,
)
def test_carrier_of_a_recipe(changed: dict[str, dict[str, Any]], carrier: str) -> None:
    recipe = Recipe().model_copy()
    on_cards: dict[str, dict[str, Any]] = {
        "generation": {"engine": "vllm", "device": "cuda"},
        "trainer": {"device": "cuda"},
        "cluster": {},
    }
    parts = {
        name: getattr(recipe, name).model_copy(update=settings | changed.get(name, {}))
        for name, settings in on_cards.items()
    }
    assert weights_carrier(recipe.model_copy(update=parts)) == carrier


def test_trainer_without_vllm_is_refused_where_vllm_is_to_carry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = {
        "weights": {"medium": "broadcast"},
        "generation": {"engine": "vllm", "device": "cuda"},
        "trainer": {"device": "cuda"},
    }
    monkeypatch.setattr("areal_flow.generation.vllm.support.installed_vllm", lambda device: None)
    with pytest.raises(ConfigError, match=r"\(nccl\): expected vllm==.* found none; install it"):
        require_carrier(build_recipe(table, source="test"))
    for over in ({"weights": {"medium": "directory"}}, {"trainer": {"device": "cpu"}}):
        require_carrier(build_recipe({**table, **over}, source="test"))
    monkeypatch.setattr("areal_flow.generation.vllm.support.installed_vllm", lambda device: "0")
    require_carrier(build_recipe(table, source="test"))
