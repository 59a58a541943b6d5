"""Pages that are written by a program say what the program would write today."""

from cua_rl.metrics import FAMILIES, METRICS
from scripts.metrics_page import PAGE, page


def test_the_page_of_metrics_is_the_list_of_metrics() -> None:
    text = page()

    assert PAGE.read_text(encoding="utf-8") == text, "run python -m scripts.metrics_page"
    assert [name for name in (*METRICS, *FAMILIES) if f"| `{name}` |" not in text] == []
