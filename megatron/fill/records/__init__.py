"""The raw records of a run, written while it runs, with one folder for each start of its training (a *segment*).

    RUN/records/1/segment.json           the segment's start and end
                 rank0.jsonl             the record of rank 0: a head, then lines that are appended as it trains
                 agent0.jsonl            the record of its jobs: a head, then the lines of each ended attempt
                 agent0.running.jsonl    the progress of the attempts that run
                 agent0.behind           exists while the agent could not write all that it knows
                 account0.json           the account of rank 0's time
                 failed, deleted         a rank has noted that the training failed, that the records were deleted

A line is JSON.  Long lists in it (bubbles, iterations, spans, uses) are tables by column.  A last line that was cut off
with its process is ignored.
"""
