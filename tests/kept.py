"""The content of a sink, read back through its own API."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pandas as pd
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from wandb.proto.wandb_internal_pb2 import Record

from areal_flow.tracking.folder_sinks import _OPEN, TensorboardTracker, WandbTracker
from areal_flow.tracking.mlflow import MlflowTracker
from tests.fakes import MemoryTracker


class Kept:
    """The content of any sink; `versions` and `aliases` only with a registry."""

    def __init__(self, sink: Any) -> None:
        self.versions: dict[str, dict[str, str]] = {}
        self.aliases: dict[str, str] = {}
        read = {
            MemoryTracker: self._of_memory,
            MlflowTracker: self._of_mlflow,
            TensorboardTracker: self._of_tensorboard,
            WandbTracker: self._of_wandb,
        }
        next(reads for kind, reads in read.items() if isinstance(sink, kind))(sink)

    def _of_memory(self, sink: Any) -> None:
        self.metrics = sink.metrics
        self.timestamps_ms = sink.timestamps_ms
        self.parameters = sink.parameters
        self.versions = {path.name: dict(sink.tags[path]) for path in sink.versions}
        self.aliases = {alias: path.name for alias, path in sink.aliases.items()}
        self.status, self.samples = sink.status, list(sink.samples)
        description = sink.description
        assert description is not None
        assert description.prompts is not None
        self.tags, self.text, self.recipe = description.tags, description.text, description.recipe
        self.datasets = [description.prompts.content_hash]

    def _of_mlflow(self, sink: Any) -> None:
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=sink.uri, registry_uri=sink.uri)
        run = client.get_run(sink.run_id)
        histories = {
            name: client.get_metric_history(sink.run_id, name) for name in run.data.metrics
        }
        for name, history in histories.items():
            assert len({m.step for m in history}) == len(history), f"{name} has a step twice"
        self.metrics = {name: {m.step: m.value for m in h} for name, h in histories.items()}
        self.timestamps_ms = {m.step: m.timestamp for m in histories["train/loss"]}
        self.parameters = run.data.params
        model_versions = client.search_model_versions(f"run_id = '{sink.run_id}'")
        self.versions = {Path(v.source).name: dict(v.tags) for v in model_versions}
        names = {v.version: Path(v.source).name for v in model_versions}
        aliases = (
            client.get_registered_model(model_versions[0].name).aliases if model_versions else {}
        )
        self.aliases = {alias: names[int(version)] for alias, version in aliases.items()}
        self.status = run.info.status
        self.datasets = [given.dataset.digest for given in run.inputs.dataset_inputs]
        self.tags, self.text = run.data.tags, run.data.tags["mlflow.note.content"]
        self.recipe = Path(client.download_artifacts(sink.run_id, "recipe.toml")).read_text()
        self.samples = []
        for shown in json.loads(run.data.tags.get("mlflow.loggedArtifacts", "[]")):
            path = client.download_artifacts(sink.run_id, shown["path"])
            self.samples += pd.read_json(path, orient="split", dtype=False).to_dict("records")

    def _of_tensorboard(self, sink: Any) -> None:
        points: dict[str, Any] = {}
        texts: dict[str, str] = {}
        for value, event in tensorboard_values(sink._layout.tensorboard):
            plugin = value.metadata.plugin_data
            if value.HasField("simple_value"):
                at = points.setdefault(value.tag, {})
                assert event.step not in at, f"{value.tag} has a step twice"
                at[event.step] = value.simple_value, int(event.wall_time * 1000)
            elif plugin.plugin_name == "text":
                texts[value.tag] = value.tensor.string_val[0].decode()
            elif value.tag == "_hparams_/session_start_info":
                start = HParamsPluginData.FromString(plugin.content).session_start_info
                hparams = start.hparams
                self.parameters = {
                    name: v.string_value or f"{v.number_value:g}" for name, v in hparams.items()
                }
        self.metrics = {
            tag: {at: value for at, (value, _) in hparams.items()}
            for tag, hparams in points.items()
        }
        self.timestamps_ms = {at: ms for at, (_, ms) in points["train/loss"].items()}
        self.status = texts.get("status", "RUNNING")
        self.text, _, table = texts["run"].partition("\n\n| ")
        rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
        self.tags = dict(rows)
        self.datasets = [self.tags.pop("prompts")]
        self.recipe = "\n".join(line[4:] for line in texts["recipe"].splitlines())
        lines = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in texts.get("held_out/samples", "").splitlines()
        ]
        self.samples = [
            {name: typed(name, cell) for name, cell in zip(lines[0], cells, strict=True)}
            for cells in lines[2:]
        ]

    def _of_wandb(self, sink: Any) -> None:
        if sink._is_open:  # W&B writes at the end, or after 32 KiB: end this part, begin another
            sink._open()
        wait_for_exits(sink._layout.wandb)
        self.metrics, self.timestamps_ms, self.samples = {}, {}, []
        config: dict[str, Any] = {}
        last = -1
        for record in wandb_records(sink._layout.wandb):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.text = record.run.notes or getattr(self, "text", "")
                config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
            elif kind == "config":
                config |= {
                    i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.config.update
                }
            elif kind == "exit":
                code = record.exit.exit_code
                self.status = {0: "FINISHED", 255: "KILLED"}.get(code, "FAILED")
            elif kind == "history":
                row = {}
                for item in record.history.item:
                    row[".".join(item.nested_key)] = json.loads(item.value_json)
                assert row.pop("_step") == last + 1, "rows are numbered over all files"
                last += 1
                self._add_row(sink, row)
        del config["_wandb"]  # of its own version
        self.status = "RUNNING" if sink._is_open else self.status
        self.parameters = {name: f"{value}" for name, value in config.items()}
        self.tags, self.datasets = self.parameters, [config["prompts_hash"]]
        (*_, recipe) = sorted(sink._layout.wandb.rglob("recipe.toml"))
        self.recipe = recipe.read_text()

    def _add_row(self, sink: Any, row: dict[str, Any]) -> None:
        if "samples.path" in row:
            (path,) = sink._layout.wandb.glob(f"wandb/offline-*/files/{row['samples.path']}")
            table = json.loads(path.read_text())
            columns = table["columns"]
            self.samples = [dict(zip(columns, cells, strict=True)) for cells in table["data"]]
            return
        axis = "policy_version" if "policy_version" in row else "step"
        at, moment = row.pop(axis), row.pop("_timestamp")
        row.pop("step", None)
        row = {name: value for name, value in row.items() if not name.startswith("_")}
        if axis == "step":
            self.timestamps_ms[at] = int(moment * 1000)
        for name, value in row.items():
            points = self.metrics.setdefault(name, {})
            assert at not in points, f"{name} has a step twice"
            points[at] = value


def typed(column: str, cell: str) -> Any:
    if column.startswith("passed"):
        return cell == "True"
    if cell == "None":
        return None
    return float(cell) if column == "difficulty" or column.startswith("reward_") else cell


def tensorboard_values(folder: Path) -> Iterator[tuple[Any, Any]]:
    for file in sorted(folder.glob("events.*"), key=written):
        for raw in RawEventFileLoader(str(file)).Load():
            event = Event.FromString(raw)
            yield from ((value, event) for value in event.summary.value)


def wandb_records(folder: Path) -> Iterator[Any]:
    """Read W&B's files: a header of seven bytes, then a log in blocks of 32 KiB, as LevelDB has."""
    for file in sorted(
        folder.glob("wandb/offline-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns
    ):
        stored, at, part = file.read_bytes(), 7, b""
        while at + 7 <= len(stored):
            if 32_768 - at % 32_768 < 7:
                at += 32_768 - at % 32_768
            _, length, kind = struct.unpack_from("<IHB", stored, at)
            part += stored[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                yield Record.FromString(part)
                part = b""


def wait_for_exits(folder: Path) -> None:
    """Wait until every finished part is on disk: W&B's own process writes after `finish`."""
    parts = [*folder.glob("wandb/offline-*/*.wandb")]
    num_ended = len(parts) - (1 if _OPEN else 0)
    until = monotonic() + 20
    while sum(r.HasField("exit") for r in wandb_records(folder)) < num_ended:
        assert monotonic() < until
        sleep(0.05)


def written(path: Path) -> tuple[str, int]:
    return path.parent.name, path.stat().st_mtime_ns
