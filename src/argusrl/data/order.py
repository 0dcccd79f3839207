"""Which prompts a step takes. The position is one integer, and everything follows from it and the seed."""

from __future__ import annotations

from typing import Any


class PromptOrder:
    """An endless sequence of row numbers: pass after pass, each a seeded permutation of all rows.

    Every pass visits each row exactly once, and any `window` numbers in a row are different, also across the end of
    a pass, so a step of up to `window` prompts never holds the same prompt twice. Only a data set smaller than
    `window` repeats within a step. Memory: two permutations, whatever the position.

    The keys come straight from the bit generator, whose stream numpy guarantees, so an order outlives upgrades.
    """

    def __init__(self, size: int, seed: int, shuffle: bool = True, *, window: int = 1) -> None:
        if size < 1:
            raise ValueError(f"size {size}: an order needs at least one row")
        if window < 1:
            raise ValueError(f"window {window}: must be at least 1")
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self._gap = window if window <= size else 1
        self._passes: dict[int, Any] = {}

    def take(self, position: int, count: int) -> list[int]:
        """`count` row numbers from `position` on. A pure function: the same on every attempt and machine."""
        if position < 0 or count < 0:
            raise ValueError(f"position {position}, count {count}: both must be at least 0")
        rows: list[int] = []
        while len(rows) < count:
            number, start = divmod(position + len(rows), self.size)
            rows.extend(self._pass(number)[start : start + count - len(rows)].tolist())
        return rows

    def _pass(self, number: int) -> Any:
        import numpy as np

        if not self.shuffle:
            return np.arange(self.size)
        if number not in self._passes:
            self._passes = {n: rows for n, rows in self._passes.items() if n == number - 1}
            self._passes[number] = self._arranged(number)
        return self._passes[number]

    def _arranged(self, number: int) -> Any:
        """Pass `number`, its first rows arranged so that they keep away from the last rows of the pass before."""
        reach = self._gap - 1
        if number == 0 or reach == 0:
            return self._permutation(number)
        if self.size >= 3 * reach:  # arranging moves the first 2 * reach rows only, so the raw end is the true end
            return self._arrange(self._permutation(number), self._permutation(number - 1)[-reach:])
        first = number - 1 if number - 1 in self._passes else 0
        rows = self._passes[first] if first else self._permutation(0)
        for later in range(first + 1, number + 1):
            rows = self._arrange(self._permutation(later), rows[-reach:])
        return rows

    def _arrange(self, rows: Any, before: Any) -> Any:
        """Move a row that also stands in `before` [reach] back until `gap` rows lie between its two visits."""
        import numpy as np

        reach = len(before)
        allowed_from = {int(row): place + 1 for place, row in enumerate(before)}
        waiting: list[int] = []
        upcoming = iter(rows[: 2 * reach].tolist())
        start: list[int] = []
        for place in range(reach):
            ready = next((row for row in waiting if allowed_from[row] <= place), None)
            if ready is not None:
                waiting.remove(ready)
            while ready is None:
                row = next(upcoming)
                if allowed_from.get(row, 0) <= place:
                    ready = row
                else:
                    waiting.append(row)
            start.append(ready)
        return np.concatenate([np.array([*start, *waiting, *upcoming], dtype=rows.dtype), rows[2 * reach :]])

    def _permutation(self, number: int) -> Any:
        import numpy as np

        keys = np.random.Philox(np.random.SeedSequence([self.seed, number])).random_raw(self.size)
        return np.argsort(keys, kind="stable")
