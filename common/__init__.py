"""What the two sides agree on; the words of the project are defined here and nowhere else.

Example:
    One item of a data set; micro-batch size, quota and K count these.
weight
    What a loss was summed over: examples, or the tokens in them. What an update is weighed by.
micro-batch
    What one forward and backward pass sees: ``micro_batch_size`` examples, the last may be shorter.
accumulation steps, K
    Micro-batches per update.
quota
    The examples that a plan asks one client for in one round; K = ceil(quota / micro_batch_size).
effective batch size
    The weight actually summed over the cohort.
update
    What a client sends: one float32 vector [P] and its weight.
population, cohort, round
    All clients known; those invited now; one server step.
dropout
    A client that was invited and did not finish (``nn.Dropout`` has its ``p_drop``).
server optimizer
    The ``torch.optim`` optimizer that steps the global model.
planner
    Decides quota, micro-batch size and K for each client.
image
    The bytes of a model as they travel down: parameters first, then frozen parameters and buffers.
place
    How far a device has walked through its examples: an epoch and an offset into its order.

The law of the project: every stage adds pairs ``(sum, weight)``, and the only division is the
server's, once, when the cohort's sum is complete.

"""
