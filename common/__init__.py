"""Code that clients and server share, and the project's glossary.

Each term has one meaning, the same in code, logs, documentation, metrics and tests.

* example: One item of a data set. Micro-batch size, quota and K count examples.
* weight: What a loss was summed over: the examples, or the tokens in them. An update is weighed
  by it.
* micro-batch: The examples of one forward and backward pass: ``micro_batch_size``, the last may
  be fewer.
* accumulation steps, K: Micro-batches per update; ``accumulation_steps`` in code, K in formulas
  and prose.
* local step, H, epoch, E: A step of an optimizer on the device itself; the local steps of a device
  in a round; a pass over its examples. Without local steps a round is one exact sum.
* quota: The examples that a plan requests from one client in one round; K = ceil(quota /
  micro_batch_size).
* effective batch size: The weight actually summed over the cohort.
* window: The examples of one plan: those that come next in the client's order, in micro-batches.
* update: What a client sends: one float32 vector [P] and its weight.
* population, cohort, round: All clients known; the clients invited now; one server step.
* client, device: The participant in a round; the machine that it runs on.
* aggregator, branch: A server of some of the devices that is one device to the server above; its
  devices.
* dropout: A client that was invited and did not finish. (``nn.Dropout`` has its ``p_drop``.)
* plan: One client's instructions for one round: quota, micro-batch size, deadline and more.
* planner: Decides quota, micro-batch size and K for each client.
* server optimizer: The ``torch.optim`` optimizer that steps the global model.
* staleness: Server steps taken since the model that an update was computed at.
* image: The bytes of a model as they are sent to clients: the trainable parameters, then the
  frozen parameters and the buffers.
* place: How far a client has advanced through its examples: an epoch, an offset into its order,
  and the places before that which a window from the epoch before had skipped.
* pairwise mask, self mask, masked sum, unmask, threshold: As in Bonawitz et al. 2017, "Practical
  Secure Aggregation for Privacy-Preserving Machine Learning": random vectors that a client shares
  with each neighbour and that cancel in the sum; one that it adds alone; the sum of masked
  updates; removing the remaining masks from it; the number of shares that recover a secret.

The law of the project: every stage adds pairs ``(sum, weight)``, and the only division is the
server's, once, when the cohort's sum is complete.
"""
