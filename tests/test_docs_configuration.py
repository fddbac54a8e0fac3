"""The script and the configuration of docs/configuration.md run as they stand."""

import re
import sys

import pytest

from lightning_pgroup.record_file import read_records
from tests.scripts import ROOT, finish, start_command

pytestmark = pytest.mark.scripts


def test_the_script_with_its_configuration(tmp_path):
    text = (ROOT / "docs" / "configuration.md").read_text()
    (tmp_path / "train.py").write_text(re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1])
    (tmp_path / "config.yaml").write_text(re.search(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1])
    (tmp_path / "digits.py").write_text((ROOT / "examples" / "digits.py").read_text())
    (command,) = re.findall(r"^\$ python (.*--config config.yaml.*at_exit)$", text, re.MULTILINE)
    done = finish(start_command([sys.executable, *command.split()], tmp_path), timeout=90)
    assert done.code == 0, done.err
    (saved,) = tmp_path.glob("lightning_logs/*/config.yaml")
    assert "destroy: at_exit" in saved.read_text()
    assert {(one["rank"], one["what"]) for one in read_records(tmp_path / "records")} == {
        (rank, what) for rank in range(2) for what in ("created", "destroyed")
    }
    assert "timeout: 0:10:00" in saved.read_text() or "timeout: 600" in saved.read_text()
