"""What the arrays of the compiled loops hold.

A message is the output of one forward or backward. Row s of a message array belongs to the forwards
of stage s, row num_stages + s to its backwards, and the column is the micro-batch. Two more rows
stand for "needs no message" (NO_INPUT, all zero) and for outputs nobody reads. An action's kind is
4 * stage + work, as in an order's codes. Times that are not known yet are UNKNOWN; others are 0 or
more.
"""

NONE = -1
UNKNOWN = -1.0

# kinds, int64[4 num_stages * NUM_KIND]: what is looked up for every action, eight numbers to a
# cache line; the FLOAT ones are read through a float64 view of the same memory.
INPUT = 0
"""Where the row of the message it needs begins."""
OUTPUT = 1
"""Where the row of the message with its output begins."""
LINK = 2
"""The link of the message that is started here: its output, or its input where `receives`."""
FLOAT_TOTAL = 3
"""Seconds from the arrival of its input to the moment its output is posted: time occupied by
receiving, overhead, work, time occupied by sending."""
FLOAT_LATENCY, FLOAT_WIRE = 4, 5
"""Of the message that is started here."""
FLOAT_INPUT_LAG = 6
"""What lies between the end of the input's producer and its arrival, were the wire free; where the
message is started by the receiver, between that end and the sender's post."""
INPUT_LINK = 6
"""In the same place, where both ends may start a message: the link its input comes over."""
FLOAT_SEND = 7
"""Time occupied by sending its output."""
NUM_KIND = 8

# clocks, float64[num_ranks, NUM_CLOCK].
NOW = 0
"""When the rank has posted its last output."""
SPENT = 1
"""Seconds of actions so far, occupied time included."""
EXPOSED = 2
"""Seconds waited for messages whose producers had finished."""
SAVED_NOW, SAVED_SPENT, SAVED_EXPOSED = 3, 4, 5
"""The same at the saved cut."""
ENDED = 6
"""When the rank's last action was done."""
LATE = 7
"""In row 0: by how much the cycles left out delay everything after the cut."""
NUM_CLOCK = 8

NAME_SHIFT = 32
"""A message's name in one integer: where the kind of its producer begins << 32 | micro-batch."""

# sends, int64[num_ranks, 4]: what a rank has to do with its own messages, by name or NONE.
PENDING = 0
"""Sent, and must be seen to arrive."""
HELD = 1
"""Of an overlapped forward, not to be sent before its backward is done."""
HALFWAY = 2
"""1 where the next action's work is done, but its message is not sent yet."""
STARTED = 3
"""How many of the messages in its stream have started, where they take turns."""
NUM_SENDS = 4

# queues, int64[2 num_ranks, 2]: by link, the first message sent that has not started and the last.
NEXT, LAST = 0, 1

# cuts, int64[NUM_CUTS].
CUTTING = 0
"""1 while the step is played from cut to cut, 0 once it is played to its end."""
CUT = 1
"""The cut that is played up to."""
SAVED = 2
"""The cut whose state is kept for comparison, or NONE."""
NUM_CUTS = 3

# cycle, int64[NUM_CYCLE]: where the cuts are; the first four as in schedules.order.Cycle.
CYCLE_MICROBATCHES, CYCLE_ACTIONS, FIRST_START, START_PER_RANK = range(4)
LAST_CUT = 4
"""The last cut that may be compared."""
LEFT_OUT = 5
"""Cycles that the played order has fewer than the one asked for."""
NUM_CYCLE = 6

# What playing ends with.
DONE, DEADLOCK, TOO_SHORT, UNALIGNED, GO_ON = range(5)
"""TOO_SHORT: the state has not come back by the last cut of the played order. UNALIGNED: it has,
but after a number of cycles that doesn't divide those left out."""
