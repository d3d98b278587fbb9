"""A server that is killed while it computes and writes leaves a store from which the next one answers rightly."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import requests

from tests.sglang.rig import Seeded, Serve, wait_for_pages


def test_sigkill_in_the_middle_of_writing(serve: Serve, seeded: Seeded, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with serve(store) as server:

        def ask(ids: list[int]) -> None:
            with contextlib.suppress(requests.RequestException):  # the server goes away under the request
                server.generate(ids, 200)

        clients = [threading.Thread(target=ask, args=(ids,)) for ids in seeded.prompts]
        for client in clients:
            client.start()
        wait_for_pages(store, 1)
        server.kill()
        for client in clients:
            client.join()
    with serve(store) as server:
        answers = [server.generate(ids) for ids in seeded.prompts]
        assert [answer.output_ids for answer in answers] == [answer.output_ids for answer in seeded.answers]
        assert sum(answer.cached_tokens["storage"] for answer in answers) > 0
        # What the crash lost is written again.
        wait_for_pages(store, seeded.pages * len(seeded.prompts))
        assert "answered as a miss" not in server.log.read_text()
