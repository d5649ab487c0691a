"""A message of a few faults, repeated for as long as its head may be: it costs what it is long.

An error of pydantic takes some hundred bytes, and a kilobyte in Python: a report of 340,000 empty
steps, which is a head of a mebibyte, took two gigabytes and seconds of the server's only thread.
"""

from __future__ import annotations

import pytest
from flwr.app import ConfigRecord, RecordDict

from headwater.common.errors import CorruptUpdate
from headwater.common.flower import records
from headwater.common.messages import Plan
from tests.commands import python

HEAD_BYTES = 1 << 16
MAX_MEBIBYTES = 30
"""The attack took 130 for a head of this length, and 2,000 for one of the longest."""

# In a process of its own: the peak of a process's memory never falls.
WORST = """
import json, resource, sys
from headwater.common import messages
from headwater.common.errors import HeadwaterError
from headwater.common.flower import records
from headwater.common.secagg import protocol
from headwater.common.tree import branch_messages

number = int(sys.argv[1])

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

def kinds(kind):
    for one in kind.__subclasses__():
        yield one
        yield from kinds(one)

def many(part):
    return part * (number // len(part))

fills = (
    "[" + many("{},") + "{}]",
    "[" + many("-1,") + "-1]",
    "{" + ",".join('"%x":{}' % at for at in range(number // 10)) + "}",
)
before, worst, refused = peak(), (0, ""), 0
for kind in dict.fromkeys(kinds(messages.WireMessage)):
    for name in (*kind.model_fields, "unknown"):
        for place, fill in enumerate(fills):
            low = peak()
            try:
                records.parse('{"%s":%s}' % (name, fill), kind)
            except HeadwaterError:
                refused += 1
            worst = max(worst, (peak() - low, f"{kind.__name__}.{name}, fill {place}"))
print(json.dumps([peak() - before, refused, worst[1]]))
"""


@pytest.mark.slow
def test_no_head_costs_much_more_than_it_is_long() -> None:
    import json

    mebibytes, refused, worst = json.loads(python("-c", WORST, HEAD_BYTES).stdout)
    assert refused > 500
    assert mebibytes < MAX_MEBIBYTES, worst


@pytest.mark.parametrize("number", [8192, 8193])
def test_a_report_has_as_many_steps_as_a_plan_may_ask_for(number: int) -> None:
    from headwater.common.errors import CorruptUpdate
    from headwater.common.flower import records
    from headwater.common.messages import UpdateReport

    step = '{"num_examples":1,"weight":1,"loss":0,"seconds":0,"peak_bytes":0}'
    head = (
        '{"name":"a","round":1,"num_examples":1,"weight":1,"loss_sum":0,"micro_batch_size":1,'
        '"seconds":0,"reason":"%s","steps":[%s]}'
    )
    text = head % ("quota", ",".join([step] * number))
    if number <= 8192:
        assert records.parse(text, UpdateReport).num_steps == number
    else:
        with pytest.raises(CorruptUpdate, match="steps"):
            records.parse(text, UpdateReport)


def test_a_head_is_as_long_as_a_frame_at_most() -> None:
    """Flower's own engines limit no message: one of 120 MB took 6.5 GB."""
    text = '{"other":"' + "x" * records.MAX_HEAD_CHARACTERS + '"}'
    with pytest.raises(CorruptUpdate, match="a head of 1,048,588 characters"):
        records.read(RecordDict({"head": ConfigRecord({"json": text})}), Plan)
