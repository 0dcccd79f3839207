from __future__ import annotations

import pytest

from argusrl.errors import FencedError
from argusrl.training.fence import Fence


def test_calls_of_an_older_epoch_or_step_are_refused():
    fence = Fence()
    fence.check(1, 4)
    fence.check(1, 4)
    fence.check(2, 0)  # a new driver may go back to the last commit
    with pytest.raises(FencedError, match="epoch 1, step 9"):
        fence.check(1, 9)
    fence.check(2, 3)
    with pytest.raises(FencedError):
        fence.check(2, 2)
