"""`python -m scripts.tiny_models.merged_model BASE ADAPTER FOLDER`: a model with an adapter merged into its weights."""

import sys
from pathlib import Path

from cua_rl.training.model_files import copy_settings, merge_adapter

if __name__ == "__main__":
    _base, _adapter, _folder = map(Path, sys.argv[1:])
    _folder.mkdir()
    copy_settings(_base, _folder)
    merge_adapter(_base, _adapter, _folder, "auto")
