"""The counting rules of `scripts/code_shape.py` on a small package."""

from pathlib import Path

from scripts.code_shape import shape


def test_the_shape_counts_rooms_configurations_and_what_is_constructed_once():
    texts = {
        "cua_rl/types.py": "@dataclass(frozen=True)\nclass Turn:\n    pass\n@dataclass\nclass LoopPlan:\n    pass\n",
        "cua_rl/rl/loop.py": "from cua_rl import types\nfrom cua_rl.rl import x\nTurn()\nLoopPlan() # 1\nLoopPlan()\n",
        "cua_rl/environments/pool.py": "from cua_rl.types import Turn\nimport os\n\na = cast(int, 1)\n",
    }

    found = shape({Path(name): text for name, text in texts.items()})

    assert found == {
        "engine_lines": 11,
        "lines": 15,
        "configuration_types": 1,
        "dataclasses": 2,
        "dataclasses_constructed_once": 1,
        "casts_per_1000_lines": 66.67,  # 1 in 15 lines
        "edges_between_rooms": 2,  # rl -> types, environments -> types
        "comments_per_100_lines": 6.67,
    }
