"""What the compiled loops hold while a step is played.

A message is the output of one forward or backward. Row s of a message array belongs to the forwards
of stage s, row num_stages + s to its backwards, and the column is the micro-batch. Two more rows
stand for "needs no message" (row 2 num_stages, all zero) and for outputs nobody reads. A kind of
action is 4 * stage + work, as in an order's codes. Times that are not known yet are UNKNOWN; others
are 0 or more.
"""

from libc.stdint cimport int8_t, int32_t, int64_t, uint32_t

from pptune.schedules.orders cimport kind_of, microbatch_of

cdef enum:
    NONE = -1

cdef enum:
    UNKNOWN = -1

cdef enum StartedBy:
    # Which end starts a message: the one that posts it last, as far as that is the same for all.
    BY_SENDER
    BY_RECEIVER
    BY_EITHER

cdef enum Wait:
    # When a rank waits for the message it has just sent; as in executors.Wait.
    NEVER
    AFTER_NEXT
    BEFORE_RECEIVE
    WITH_RECEIVE

cdef enum Status:
    # What playing ends with. TOO_SHORT: the state has not come back by the last cut of the played
    # order. UNALIGNED: it has, but after a number of cycles that doesn't divide those left out.
    DONE
    DEADLOCK
    TOO_SHORT
    UNALIGNED
    GO_ON

cdef struct Kind:
    # What is looked up for every action; one cache line.
    int64_t input    # Where the row of the message it needs begins.
    int64_t output   # Where the row of the message with its output begins.
    int32_t link     # Of the message that is started here: its output, or its input BY_RECEIVER.
    int32_t input_link  # BY_EITHER: the link its input comes over.
    double total     # From the arrival of its input to the moment its output is posted: time
                     # occupied by receiving, overhead, work, time occupied by sending.
    double latency   # Of the message that is started here.
    double wire
    double input_lag  # Between the end of the input's producer and its arrival, were the wire free;
                      # BY_RECEIVER between that end and the sender's post.
    double send      # Time occupied by sending its output.

cdef struct Clock:
    # Of a rank; the saved ones are those at the saved cut.
    double now       # When it has posted its last output.
    double saved_now
    double spent     # Seconds of actions so far, occupied time included.
    double saved_spent
    double exposed   # Seconds waited for messages whose producers had finished.
    double saved_exposed
    double ended     # When its last action was done.

cdef struct Sends:
    # What a rank has to do with its own messages, by name_of or NONE.
    int64_t pending  # Sent, and must be seen to arrive.
    int64_t held     # Of an overlapped forward, not to be sent before its backward is done.
    int64_t started  # How many messages of its stream have started, where they take turns.
    bint halfway     # Whether the next action's work is done, but its message is not sent yet.

cdef struct Queue:
    # Of a link, by name_of or NONE: the first message sent that has not started, and the last.
    int64_t next
    int64_t last

cdef struct Turn:
    # One action of a sequence, see sequence.pyx, and the places in the arrays that it deals with.
    int32_t kind
    int32_t rank
    int32_t input    # Of the message it needs.
    int32_t output   # Of the one it makes.
    int32_t posted   # In `done`: the action after which its rank posted the receive.
    int32_t done     # In `done`: itself.

cdef struct Step:
    # The part of the order that is played; see schedules.orders.Codes.
    const int64_t* codes
    const int64_t* lengths
    int64_t width
    int64_t num_ranks
    int64_t num_stages
    const int64_t* ranks  # The rank of each stage.
    # Kinds [4 num_stages], and messages [2 num_stages + 2, stride]; what a loop does not use is
    # NULL.
    Kind* kinds
    int64_t stride
    double* sent
    double* arrived
    double* produced
    int64_t* following  # The name of the next message on its link.
    double* done        # When a rank had done an action, after an entry for the step's start:
                        # [num_ranks, width + 1].
    # See posts.pxd.
    const int32_t* posted_after
    const int32_t* ticks
    const int32_t* produced_tick
    const int8_t* waits
    const int64_t* streams
    int64_t stream_width
    const Turn* turns   # NULL where ranks are visited instead.
    bint pairs_together
    # By rank, and by link: 2 * rank for the link to the next rank, 1 more for that to the rank
    # before, 2 * num_ranks for none.
    Clock* clocks
    int64_t* places     # How many actions each rank has done.
    int64_t* limits     # Where each rank stops next.
    Sends* sends
    double* free        # When the wire is free again.
    double* saved_free  # The same at the saved cut.
    Queue* queues
    bint wired          # Whether any message occupies its link.
    # Cuts, see cuts.pxd.
    bint cutting        # Whether the step is played from cut to cut; False on the way to the end.
    int64_t cut         # The cut that is played up to.
    int64_t saved       # The cut whose state is kept for comparison, or NONE.
    int64_t last_cut    # The last cut that may be compared.
    int64_t cycle_microbatches  # This and the next three as in schedules.order.Cycle.
    int64_t cycle_actions
    int64_t first_start
    int64_t start_per_rank
    int64_t left_out    # Cycles that the played order has fewer than the one asked for.
    double late         # By how much they delay everything after the cut.


cdef inline int64_t rank_at(int64_t turn, int64_t num_ranks) noexcept nogil:
    """Whose turn it is: even ranks come first, then odd ones. Neighbours wait for each other, so a
    round gets furthest, and the processor overlaps visits, where they don't follow each other."""
    return 2 * turn if 2 * turn < num_ranks else (2 * turn - num_ranks) | 1


cdef inline int64_t input_of(const Step* step, int64_t code) noexcept nogil:
    """The place of the message that an action needs."""
    return step.kinds[kind_of(code)].input + microbatch_of(code)


cdef inline int64_t output_of(const Step* step, int64_t code) noexcept nogil:
    """The place of the message that an action makes."""
    return step.kinds[kind_of(code)].output + microbatch_of(code)


cdef inline int64_t no_input(const Step* step) noexcept nogil:
    """Where the row of "needs no message" begins."""
    return 2 * step.num_stages * step.stride


cdef inline int64_t name_of(int64_t code) noexcept nogil:
    """The message that an action makes, in one integer."""
    return kind_of(code) << 32 | microbatch_of(code)


cdef inline int64_t maker_of(int64_t name) noexcept nogil:
    """The kind of action that makes a message."""
    return name >> 32


cdef inline int64_t place_of(const Step* step, int64_t name) noexcept nogil:
    """The place of a message."""
    return step.kinds[maker_of(name)].output + <uint32_t> name
