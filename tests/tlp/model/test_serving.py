"""A registered version is usable by stock MLflow alone, with pickle switched off."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from storage import DuckDBStore
from tlp.core.registry import Submission
from tlp.core.settings import Settings
from tlp.language.vocabulary import Vocabulary
from tlp.model.checkpoint import Checkpoint, Manifest
from tlp.model.config import TLPConfig
from tlp.model.network import MTLTLP
from tlp.model.predictor import Predictor
from tlp.registry import Registry

HEADS = ("x86-64-v2", "x86-64-v3")


@pytest.fixture
def checkpoint() -> Checkpoint:
    torch.manual_seed(0)
    config = TLPConfig(HEADS, dims=(16, 16), attention_heads=2, head_dims=(8,))
    manifest = Manifest(
        family="x86_64",
        encoder_version=config.encoder_version,
        heads=HEADS,
        targets={name: {"kind": "llvm", "mcpu": name, "num-cores": 1} for name in HEADS},
        samples=dict.fromkeys(HEADS, 10),
        watermark=20,
        holdout=(),
        strategy="joint",
        parent=None,
        seeds=(0,),
    )
    return Checkpoint(config, Vocabulary(), manifest, MTLTLP(config).state_dict())


def test_pyfunc_scores_like_the_predictor(checkpoint: Checkpoint, mlflow_settings: Settings, tmp_path: Path) -> None:
    registry = Registry(mlflow_settings, DuckDBStore())
    registry.register(Submission(checkpoint.save(tmp_path / "checkpoint"), "x86_64"))
    registry.promote("x86_64", 1, reason="first")

    rng = np.random.default_rng(0)
    features = rng.random((5, checkpoint.config.length, checkpoint.config.width), dtype=np.float32)
    np.save(tmp_path / "features.npy", features)
    code = textwrap.dedent("""
        import sys
        import mlflow
        import numpy as np
        mlflow.set_tracking_uri(sys.argv[1])
        model = mlflow.pyfunc.load_model("models:/mtl-tlp-x86_64@champion")
        features = np.load("features.npy")
        np.save("first.npy", model.predict(features))
        np.save("second.npy", model.predict(features, params={"device": "x86-64-v3"}))
        for wrong in (features[:, :-1], features.astype(np.float64)):
            try:
                model.predict(wrong)
            except mlflow.exceptions.MlflowException:
                continue
            raise AssertionError(f"{wrong.shape} {wrong.dtype} was accepted")
    """)
    env = {**os.environ, "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}
    command = [sys.executable, "-c", code, mlflow_settings.mlflow_tracking_uri]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr

    for name, head in (("first", HEADS[0]), ("second", HEADS[1])):
        scores = np.load(tmp_path / f"{name}.npy")
        assert scores.shape == (5, 1)
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores[:, 0], Predictor(checkpoint, head).score_features(features), rtol=1e-6)
    assert not np.array_equal(np.load(tmp_path / "first.npy"), np.load(tmp_path / "second.npy"))


def test_no_pickle_among_the_files(checkpoint: Checkpoint, mlflow_settings: Settings, tmp_path: Path) -> None:
    registry = Registry(mlflow_settings, DuckDBStore())
    registry.register(Submission(checkpoint.save(tmp_path / "checkpoint"), "x86_64"))
    folder = registry.resolve("x86_64", ref=1).checkpoint_dir
    assert Checkpoint.load(folder).heads == HEADS
    names = {path.name for path in folder.parents[1].rglob("*") if path.is_file()}
    assert "serving.py" in names
    assert not {name for name in names if name.endswith((".pkl", ".pickle", ".pt", ".pth", ".bin"))}
