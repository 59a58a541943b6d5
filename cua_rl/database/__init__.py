"""The database. Importing any module of it declares every table, so that no command works on a part of the schema."""

from cua_rl.database import analysis_models as analysis_models
from cua_rl.database import judge_models as judge_models
from cua_rl.database import monitor_models as monitor_models
from cua_rl.database import tinker_models as tinker_models
