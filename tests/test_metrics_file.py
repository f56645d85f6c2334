"""The CSV of logged figures."""

from pathlib import Path

from lit_refusion.metrics_file import CsvMetrics


def test_columns_grow_and_a_resumed_run_keeps_earlier_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    first = CsvMetrics(path)
    first.log_metrics({"train/loss": 3.0}, step=1)
    first.log_metrics({"train/loss": 2.0}, step=2)
    first.log_metrics({"val/loss": 2.5}, step=2)
    first.log_metrics({"train/loss": 1.5}, step=3)
    assert path.read_text() == "step,train/loss,val/loss\n1,3.0,\n2,2.0,\n2,,2.5\n3,1.5,\n"

    resumed = CsvMetrics(path)  # from a checkpoint of step 2: step 3 is trained again
    resumed.log_metrics({"train/loss": 1.0, "train/new": 7.0}, step=3)
    rows = [line.split(",") for line in path.read_text().splitlines()]
    assert sorted(rows[0]) == ["step", "train/loss", "train/new", "val/loss"]
    assert [row[0] for row in rows[1:]] == ["1", "2", "2", "3"]
    assert dict(zip(rows[0], rows[-1])) == {"step": "3", "train/loss": "1.0", "train/new": "7.0", "val/loss": ""}
    assert sorted(item.name for item in tmp_path.iterdir()) == ["metrics.csv"]
