"""Options of single methods under each protocol, where the paper and its authors' code differ."""

from __future__ import annotations

from collections.abc import Mapping

METHOD_PRESETS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "corrected": {},
    "paper": {
        "gpfl": {"p_scale": "mean", "cond_source": "global", "mlg_norm": "sample_mean", "reg": "norm"},
    },
    "reference": {
        "gpfl": {"p_scale": "sum", "cond_source": "stale_local", "mlg_norm": "batch", "reg": "wd"},
        "pfedme": {"eval_model": "local_w"},
    },
}
"""Protocol, method, option, value. Options that the user sets override them."""
