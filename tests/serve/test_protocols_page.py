"""docs/protocols.md: its client code runs, and its numbers match the code. test_ray_serve.py runs the part on Ray."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT, import_peer
from serving import photo, run_server, served

from vitrail.serve.inference_outputs import describe_outputs
from vitrail.serve.ray_serve import MAX_ONGOING_REQUESTS
from vitrail.serve.request_parsing import MAX_VALUES

PAGE = (ROOT / "docs" / "protocols.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("peer", ["tritonclient.http", "openai"])
def test_the_snippets_of_the_clients_run(peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_peer(peer)
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("cat.jpg", "dog.jpg")):
        Path(name).write_bytes(photo(number))
    [snippet] = [snippet for snippet in SNIPPETS if peer in snippet]
    with run_server(served()) as (client, _):
        names: dict[str, object] = {}
        code = snippet.replace("127.0.0.1:8000", f"{client.base_url.host}:{client.base_url.port}")
        exec(compile(code, "protocols.md", "exec"), names)
        checked = [line.partition("  # ") for line in snippet.splitlines() if re.search(r"  # [\d(T]", line)]
        assert checked
        for expression, _, value in checked:
            assert eval(expression, names) == eval(value)


def test_the_numbers_and_outputs_on_the_page_are_those_of_the_code() -> None:
    assert f"at most {MAX_VALUES:,} values" in PAGE
    assert f"(default {MAX_ONGOING_REQUESTS};" in PAGE
    table = PAGE.partition("| output | datatype and shape |")[2].partition("\n\n")[0]
    rows = {
        name: (datatype, shape) for name, datatype, shape in re.findall(r"\| `(\w+)` \| `(\w+)` `(\S.*?)` \|", table)
    }
    described = {one["name"]: one for one in describe_outputs(served())}
    assert set(rows) == set(described)
    for name, (datatype, shape) in rows.items():
        assert datatype == described[name]["datatype"]
        assert shape.count(",") + 1 == len(described[name]["shape"])
