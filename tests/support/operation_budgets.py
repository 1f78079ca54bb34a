# SPDX-License-Identifier: Apache-2.0
"""What every call of the cache may cost, and a step on each helper thread, with hidden rows and one further key.

Lower a number when the code gets cheaper. Raising one is a decision, because it makes every step of every engine
slower: say why in the commit. A call grows with nothing but what its `per` names.
"""

from __future__ import annotations

from operation_costs import Budget, Cost

# -- the engine thread. A step may grow with its news: requests that enter, get blocks or are owed rows. Requests that
# -- just go on, tokens and blocks add nothing.

NEW_STEP_STARTS = Budget(Cost(torch_ops=0, locks=1, python_calls=10, c_calls=1))
SAVE_OUTPUTS = Budget(Cost(torch_ops=2, locks=3, python_calls=84, c_calls=35))

# One request ends, another brings its whole prompt; the form of the step and the views of the staging page are new.
NEW_STEP_STARTS_OF_A_PREFILL = Budget(Cost(torch_ops=0, locks=1, python_calls=52, c_calls=46))
SAVE_OUTPUTS_OF_A_PREFILL = Budget(Cost(torch_ops=8, locks=3, python_calls=169, c_calls=104))

# As many requests end as hit stored rows and compute one each.
NEW_STEP_STARTS_WITH_HITS = Budget(
    Cost(torch_ops=0, locks=1, python_calls=35, c_calls=27),
    each=Cost(torch_ops=0, locks=0, python_calls=43, c_calls=42),
    per="request that ends and request that hits",
)
SAVE_OUTPUTS_WITH_HITS = Budget(Cost(torch_ops=2, locks=3, python_calls=93, c_calls=50))

SAVE_OUTPUTS_WITH_DRAFTS = Budget(Cost(torch_ops=2, locks=3, python_calls=93, c_calls=47))

# One request of the batch ends. The batch is another one then: its requests are looked up afresh.
NEW_STEP_STARTS_FINISHING = Budget(Cost(torch_ops=0, locks=1, python_calls=24, c_calls=19))
SAVE_OUTPUTS_FINISHING = Budget(Cost(torch_ops=2, locks=3, python_calls=84, c_calls=42))

NEW_STEP_STARTS_EXTENDING = Budget(
    Cost(torch_ops=0, locks=1, python_calls=16, c_calls=11),
    each=Cost(torch_ops=0, locks=0, python_calls=3, c_calls=8),
    per="request that gets blocks",
)

SAVE_OUTPUTS_CARRYING = Budget(
    Cost(torch_ops=2, locks=3, python_calls=109, c_calls=57),
    each=Cost(torch_ops=0, locks=0, python_calls=15, c_calls=11),
    per="request that is owed rows",
)

SAVE_OUTPUTS_PASSING_ON = Budget(Cost(torch_ops=3, locks=3, python_calls=175, c_calls=90))
SAVE_OUTPUTS_PASSING_LISTS_ON = Budget(
    Cost(torch_ops=3, locks=3, python_calls=175, c_calls=93),
    each=Cost(torch_ops=0, locks=0, python_calls=8, c_calls=5),
    per="tensor of a list that is passed on",
)

# The further key is deferred: one lock more, for room on the device.
SAVE_OUTPUTS_DEFERRING = Budget(Cost(torch_ops=2, locks=4, python_calls=112, c_calls=40))
SAVE_OUTPUTS_UNDER_PRESSURE = Budget(Cost(torch_ops=2, locks=4, python_calls=124, c_calls=43))
NEW_STEP_STARTS_FINISHING_DEFERRED = Budget(
    Cost(torch_ops=0, locks=1, python_calls=45, c_calls=29),
    each=Cost(torch_ops=0, locks=0, python_calls=2, c_calls=0),
    per="record that the request's end forces off the device",
)

# -- the consumer's thread. A step that delivers every row it computed, and nothing else, costs one copy per key. Any
# -- other is joined request by request. Tokens add nothing.

MATERIALIZE = Budget(Cost(torch_ops=2, locks=4, python_calls=69, c_calls=32))
MATERIALIZE_DEFERRED = Budget(Cost(torch_ops=2, locks=4, python_calls=74, c_calls=32))
MATERIALIZE_WITH_HITS = Budget(
    Cost(torch_ops=0, locks=2, python_calls=66, c_calls=26),
    each=Cost(torch_ops=26, locks=0, python_calls=43, c_calls=44),
    per="request that hit",
)
MATERIALIZE_WITH_DRAFTS = Budget(
    Cost(torch_ops=25, locks=4, python_calls=115, c_calls=75),
    each=Cost(torch_ops=0, locks=0, python_calls=3, c_calls=3),
    per="request with drafts",
)
MATERIALIZE_PASSED_ON = Budget(
    Cost(torch_ops=13, locks=4, python_calls=82, c_calls=51),
    each=Cost(torch_ops=1, locks=0, python_calls=3, c_calls=4),
    per="entry of a tensor that was passed on",
)
MATERIALIZE_LISTS_PASSED_ON = Budget(
    Cost(torch_ops=14, locks=4, python_calls=81, c_calls=47),
    each=Cost(torch_ops=0, locks=0, python_calls=3, c_calls=4),
    per="tensor of a list that was passed on",
)
# One request of the step is not asked for,
MATERIALIZE_LEAVING_OUT = Budget(
    Cost(torch_ops=25, locks=4, python_calls=123, c_calls=82),
    each=Cost(torch_ops=0, locks=0, python_calls=3, c_calls=3),
    per="request that is asked for",
)
# or several are not, beside eight that are.
MATERIALIZE_LEAVING_SOME_OUT = Budget(
    Cost(torch_ops=25, locks=4, python_calls=138, c_calls=101),
    each=Cost(torch_ops=0, locks=0, python_calls=9, c_calls=5),
    per="request that is not asked for",
)
# Rows of earlier steps come along, beside eight requests that are owed nothing.
MATERIALIZE_CARRYING = Budget(
    Cost(torch_ops=25, locks=4, python_calls=153, c_calls=108),
    each=Cost(torch_ops=26, locks=0, python_calls=43, c_calls=44),
    per="request that is owed rows",
)
MATERIALIZE_TWO_PHASE = Budget(
    Cost(torch_ops=4, locks=4, python_calls=75, c_calls=42),
    each=Cost(torch_ops=0, locks=0, python_calls=7, c_calls=3),
    per="request delivered",
)
# What describes a request's rows is made when the first is looked at, with one operation per key.
FIRST_LOOK = Budget(
    Cost(torch_ops=2, locks=0, python_calls=5, c_calls=6),
    each=Cost(torch_ops=0, locks=0, python_calls=1, c_calls=0),
    per="request delivered",
)
ACKNOWLEDGE = Budget(Cost(torch_ops=0, locks=0, python_calls=1, c_calls=0))
ACKNOWLEDGE_TWO_PHASE = Budget(
    Cost(torch_ops=0, locks=1, python_calls=5, c_calls=1),
    each=Cost(torch_ops=0, locks=0, python_calls=0, c_calls=2),
    per="request acknowledged",
)
RELEASE = Budget(Cost(torch_ops=0, locks=1, python_calls=15, c_calls=10))
RELEASE_TWO_PHASE = Budget(Cost(torch_ops=0, locks=2, python_calls=18, c_calls=11))
DISCARD_STEP = Budget(
    Cost(torch_ops=0, locks=2, python_calls=29, c_calls=10),
    each=Cost(torch_ops=0, locks=0, python_calls=9, c_calls=5),
    per="request of the step",
)

# -- calls that belong to no step. They may grow with the stored keys, of which there are a few.

FLUSH_WITH_NOTHING_QUEUED = Budget(Cost(torch_ops=0, locks=1, python_calls=19, c_calls=8))
TAKE_PARTIAL_REQUESTS = Budget(
    Cost(torch_ops=0, locks=1, python_calls=5, c_calls=2),
    each=Cost(torch_ops=0, locks=0, python_calls=12, c_calls=4),
    per="report",
)
STATS = Budget(
    Cost(torch_ops=0, locks=1, python_calls=49, c_calls=14),
    each=Cost(torch_ops=0, locks=0, python_calls=2, c_calls=3),
    per="stored key",
)
BUMP_WEIGHT_VERSION = Budget(
    Cost(torch_ops=0, locks=1, python_calls=12, c_calls=1),
    each=Cost(torch_ops=0, locks=0, python_calls=2, c_calls=1),
    per="stored key",
)
RESET_IDLE = Budget(
    Cost(torch_ops=0, locks=1, python_calls=30, c_calls=13),
    each=Cost(torch_ops=0, locks=0, python_calls=5, c_calls=2),
    per="stored key",
)
# Of a cache with two stored keys.
RESET_WITH_LIVE_REQUESTS = Budget(
    Cost(torch_ops=0, locks=1, python_calls=40, c_calls=17),
    each=Cost(torch_ops=0, locks=0, python_calls=5, c_calls=7),
    per="live request",
)
# Asks how much memory the machine has; how many calls that takes is not the same on every one.
REGISTER_POLICY = Budget(Cost(torch_ops=0, locks=2))
REGISTER_POLICY_DEFERRING = Budget(Cost(torch_ops=5, locks=12))

# -- the helper threads. Landing a step costs the committer the same, whatever the step has; the prefetch thread gathers
# -- request by request, and any number of tokens with the same operations.

COMMITTER_LANDING = Budget(Cost(torch_ops=4, locks=5, python_calls=60, c_calls=11))
# Of a form it has not landed before: the words of each key are viewed once.
COMMITTER_LANDING_NEW_FORM = Budget(Cost(torch_ops=12, locks=5, python_calls=86, c_calls=27))
# Hidden rows at once, and the record of the deferred key when the step is taken.
COMMITTER_LANDING_DEFERRED = Budget(Cost(torch_ops=12, locks=13, python_calls=155, c_calls=28))
# Records that waited, all forced at once, and the hidden rows of their steps.
COMMITTER_LANDING_RECORDS = Budget(
    Cost(torch_ops=10, locks=8, python_calls=108, c_calls=19),
    each=Cost(torch_ops=10, locks=6, python_calls=78, c_calls=18),
    per="record",
)
PREFETCH_OF_HITS = Budget(
    Cost(torch_ops=8, locks=11, python_calls=145, c_calls=55),
    each=Cost(torch_ops=12, locks=0, python_calls=12, c_calls=30),
    per="request that hits",
)
