"""What transformers answers in float32 on the same folder: one sequence after the other, no padding.

    python -m benchmarks.tables.reference FOLDER --task embed --device cuda:0 < ids.json > rows.json

A process of its own, so that nothing of it stays on the card while servers are measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.tables.dialects import Rows

if TYPE_CHECKING:  # who asks for a reference need not wait for torch
    from torch import Tensor


def reference_rows(folder: Path, task: str, device: str, sequences: Sequence[Sequence[int]]) -> Rows:
    """Unit vectors `[N, D]`, or logits `[N, labels]`. Raises `RuntimeError` when transformers fails."""
    command = [sys.executable, "-m", "benchmarks.tables.reference", str(folder)]
    done = subprocess.run(
        [*command, "--task", task, "--device", device],
        input=json.dumps([list(ids) for ids in sequences]),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the reference failed:\n{done.stderr[-2000:]}")
    return np.asarray(json.loads(done.stdout.splitlines()[-1]), np.float32)


def _compute(folder: Path, task: str, device: str, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    import torch
    from transformers import AutoModel, AutoModelForSequenceClassification

    torch.backends.cuda.matmul.allow_tf32 = False
    kind: Any = AutoModel if task == "embed" else AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    pooling = _pooling(folder) if task == "embed" else ""
    rows = []
    with torch.inference_mode():
        for ids in sequences:
            output = model(input_ids=torch.tensor([ids], device=device))
            row = output.logits[0] if task == "score" else _pooled(output.last_hidden_state[0], pooling)
            rows.append(row.float().cpu().tolist())
    return rows


def _pooling(folder: Path) -> str:
    """As sentence-transformers writes it: one word today, a switch for each kind earlier."""
    settings = json.loads((folder / "1_Pooling" / "config.json").read_text())
    kinds = {
        "cls": "pooling_mode_cls_token",
        "mean": "pooling_mode_mean_tokens",
        "lasttoken": "pooling_mode_lasttoken",
    }
    mode = settings.get("pooling_mode") or next(
        (kind for kind, switch in kinds.items() if settings.get(switch)), None
    )
    if mode not in kinds:
        raise ValueError(f"{folder}: no pooling that is known here in {settings}")
    return str(mode)


def _pooled(hidden_TD: Tensor, pooling: str) -> Tensor:
    import torch

    rows = {
        "cls": lambda: hidden_TD[0],
        "mean": lambda: hidden_TD.mean(0),
        "lasttoken": lambda: hidden_TD[-1],
    }
    return torch.nn.functional.normalize(rows[pooling](), dim=-1)


def main() -> None:
    """Ids from standard input, rows to standard output."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=("embed", "score"), required=True)
    parser.add_argument("--device", required=True)
    args = parser.parse_args()
    print(json.dumps(_compute(args.folder, args.task, args.device, json.load(sys.stdin))))


if __name__ == "__main__":
    main()
