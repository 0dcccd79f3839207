import gc
import os
import sys

import pytest

from argusrl.training.process import import_meanwhile, many_imports


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_left_alone_while_much_is_imported_and_looked_for_again_afterwards(fails):
    before = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError) if fails else many_imports(), many_imports():
            assert not gc.isenabled()
            if fails:
                raise ImportError
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_what_is_imported_meanwhile_gives_way_and_leaves_the_process_as_it_was(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    (tmp_path / "slow_module.py").write_text(
        "import os, threading\nNICE = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())\n"
    )
    (tmp_path / "broken_module.py").write_text("raise ValueError('broken')\n")
    try:
        import_meanwhile("slow_module")
        niceness = sys.modules["slow_module"].NICE
        assert niceness == max(before, 10)
        assert os.getpriority(os.PRIO_PROCESS, 0) == before
        with pytest.raises(ValueError, match="broken"):
            import_meanwhile("broken_module")
    finally:
        sys.modules.pop("slow_module", None)
        gc.unfreeze()
