"""The entry point of a training with PipeFill.

``launch(main)`` runs a Megatron script's ``main`` with the patches applied.  When Megatron is initialised it starts a
``Session``, with this rank's gate, agent and listener, and finishes it when ``main`` is done.
"""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.fill.device.before_cuda  # noqa: F401 -- before the script imports Megatron, which looks for CUDA
import pipefill_patches
from megatron.fill.agent.claims import forget_submitted, not_yet_submitted
from megatron.fill.agent.turn import DeviceTurn
from megatron.fill.app.closing import Others, kept, measure_alone, report_end, rounds, tell_of_jobs
from megatron.fill.app.expected import warn_of_few_bubbles, warn_of_no_ramp
from megatron.fill.app.freeing import Freed, check_free_waits
from megatron.fill.app.placing import check_between, jobs_outlive_ranks, take_rank, take_turn, world_size
from megatron.fill.app.runfolder import check_store, make_run_folder, new_run_folder, say_if_away, served, store_of
from megatron.fill.app.runlock import exit_together, lock_run_folder
from megatron.fill.app.sandboxing import RunSandbox, check_flags, find_sandbox
from megatron.fill.app.session import Session
from megatron.fill.app.share import share, why_no_client
from megatron.fill.attached import attached
from megatron.fill.config import FillSettings
from megatron.fill.device.joining import flag_of
from megatron.fill.device.meter import own_version
from megatron.fill.device.mps import MpsDaemon
from megatron.fill.display import counted, never_fail_to_print
from megatron.fill.errors import ConfigError, FillError, RunTaken, exit_saying
from megatron.fill.given.jobs import submitter
from megatron.fill.given.rankorder import load_rank_order
from megatron.fill.hooks import bus
from megatron.fill.linux.host import ignore_notices, process_started_ns, unordered
from megatron.fill.planner.offload import weigh_offload
from megatron.fill.records.segment import OpenSegment, SegmentEnding, begin_segment
from megatron.fill.records.unwritten import Unwritten
from megatron.fill.scheduler.policies import parse_policy
from megatron.fill.store.location import database_file, locate, print_next, shown
from megatron.fill.types import RankInfo
from megatron.fill.work import NewJob

logger = logging.getLogger("pipefill")

_MOST_WAIT_S = 600.0  # for other ranks at the end of the training


class Launch:
    """A run of a Megatron script with the patches applied."""

    def __init__(self) -> None:
        self.settings: FillSettings | None = None
        self.session: Session | None = None
        self._taken: tuple[int, Any] | None = None  # the rank by --fill-rank-order, and the store that it serves
        self._run_dir: Path | None = None
        self._lock: int | None = None  # the descriptor that holds it
        self._segment: OpenSegment | None = None  # on rank 0
        self._jobs: list[NewJob] = []
        self._new_jobs: list[NewJob] = []  # on rank 0: the jobs that no earlier run in this folder has submitted
        self._rounds = 0  # number of rounds in which jobs are measured alone
        self.mps: MpsDaemon | None = None
        self.sandbox = RunSandbox()
        self._others: Others | None = None
        self._freed: Freed | None = None
        self._turn: DeviceTurn | None = None

    def take_turn(self) -> None:
        """Take the device from jobs of an earlier start, before anything is imported that uses CUDA.

        A run folder that the command line does not name is known once it is parsed.  A training that may be refused
        (``check_between``) leaves the jobs alone until then.
        """
        report = flag_of(sys.argv, "--fill-report")
        may_be_refused = flag_of(sys.argv, "--fill-between") is not None and not jobs_outlive_ranks()
        if report and not may_be_refused:
            self._turn = take_turn(Path(report))

    def on_parse(self, args: Namespace) -> None:
        self.settings = settings = FillSettings.from_args(args)
        if settings.rank_order is not None and self._taken is None:  # a script may parse its flags twice
            self._taken = take_rank(load_rank_order(settings.rank_order, world_size()))
            args.rank = self._taken[0]
        check_between(settings)
        run_dir = None if settings.report is None else Path(settings.report)
        if run_dir is not None:
            try:
                run_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"--fill-report {run_dir}: {error.strerror}; expected a folder that can be written"
                ) from error
            self._turn = self._turn or take_turn(run_dir)
        parse_policy(settings.policy)
        if settings.active and (reason := unordered()):
            raise ConfigError(f"bubbles cannot be filled or measured here: {reason}")
        on_cpu = pipefill_patches.PATCHES["cpu_backend"].applied
        search = [] if args.fill_jobs is None else [str(Path(args.fill_jobs).resolve().parent), os.getcwd()]
        if settings.serves:
            own_version()  # agents need it; raised here, its error reaches the user
            check_store(settings, run_dir)
            check_flags(settings)
            if not self.sandbox.layers:  # a script may parse its flags twice
                self.mps = share(settings, on_cpu)
                self.sandbox = find_sandbox(settings, self.mps, search, on_gpu=not on_cpu)
        self._jobs = [job.to_submit(search, submitter()) for job in settings.jobs]
        if settings.pipeline_schedule == "gpipe":
            if args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank:
                raise ConfigError("--fill-pipeline-schedule gpipe does not interleave; expected no virtual stages")
            pipefill_patches.apply(("gpipe",))
        if settings.free_waits:
            through_host = pipefill_patches.PATCHES["host_p2p"].applied
            check_free_waits(args, active=settings.active, on_cpu=on_cpu, through_host=through_host)
        if settings.offload_optimizer:
            if not (args.bf16 or args.fp16 or on_cpu):
                raise ConfigError(
                    "--fill-offload-optimizer moves the optimizer's own copy of the weights too, and in fp32 it has "
                    "none; expected --bf16 or --fp16"
                )
            pipefill_patches.apply(("offload",))
            attached.offload_pays = self.offload_pays

    def offload_pays(self, gained_bytes: int, lost_ns: int, iteration_ns: int) -> bool:
        free_bytes = self.session.listening.free_bytes() if self.session is not None else 0
        pays, why = weigh_offload(gained_bytes, free_bytes, lost_ns, iteration_ns)
        where = "in host memory between steps" if pays else "on the device"
        rank = os.environ.get("RANK", "0")
        print(f"PipeFill: rank {rank} keeps its optimizer state {where}: {why}", flush=True)
        return pays

    def on_start(self, info: RankInfo, args: Namespace) -> None:
        settings = self.settings
        if settings is None or not settings.active:
            return
        if info.rank == 0 and getattr(args, "rampup_batch_size", None):
            from megatron.core.num_microbatches_calculator import get_current_global_batch_size

            warn_of_no_ramp(args.rampup_batch_size, get_current_global_batch_size())
        most_s = 30.0 * args.distributed_timeout_minutes  # half the timeout of the collective in which other ranks wait
        locked = lock_run_folder(settings.report or new_run_folder(), info, most_s)
        if locked is None:
            return
        run_dir, self._lock = locked
        segment = self._prepare_run(settings, info, run_dir)
        if segment is None:
            return
        self._run_dir = run_dir
        timeout_s = 60.0 * args.distributed_timeout_minutes
        self._others = Others(segment.name, info, min(timeout_s, _MOST_WAIT_S))
        if settings.free_waits:
            try:
                self._freed = Freed(info)  # all ranks together
            except FillError as error:
                if info.rank == 0:
                    print(f"PipeFill: {error}", flush=True)
        if self.mps is not None and (lacking := why_no_client(self.mps)):
            logger.warning("rank %d fills nothing: %s", info.rank, lacking)
            return
        if info.rank == 0 and settings.serves:
            warn_of_few_bubbles(info, args)
        self.session = Session(
            settings,
            info,
            run_dir,
            segment,
            store_of(settings, run_dir),
            self._new_jobs,
            self.mps,
            self.sandbox,
            owns_margin=settings.serves and not args.empty_unused_memory_level,  # emptying the cache would release it
        )
        bus.listener = self.session.listening.listener

    def _prepare_run(self, settings: FillSettings, info: RankInfo, run_dir: Path) -> Path | None:
        """Return the segment's folder, which rank 0 makes and broadcasts; None if that failed."""
        agreed: list[Any] = ["", rounds(settings, info)]
        if info.rank == 0:
            try:
                make_run_folder(run_dir, self.sandbox.seen)
                store = store_of(settings, run_dir)
                file = database_file(store)
                if settings.resubmit or not (file is None or file.exists()):
                    forget_submitted(run_dir)
                self._new_jobs = not_yet_submitted(run_dir, store, self._jobs)
                self._segment = self._begin(settings, run_dir, info)
                agreed[0] = str(self._segment.segment.folder)
                print(f"PipeFill: {_counted(len(self._jobs), len(self._new_jobs))}, run folder {run_dir}", flush=True)
                if settings.serves:
                    print(served(settings, run_dir), flush=True)
                    # In a thread, so that the training does not wait for a server or a name that does not answer.
                    threading.Thread(target=say_if_away, args=(store,), daemon=True).start()
                    if not settings.jobs:
                        print("PipeFill: no --fill-jobs: it runs what is in that store, and what pipefill submit adds")
                    name = shlex.quote(str(run_dir))
                    print_next(None, f"top {name}", f"pause {name}")
            except Exception as error:  # whatever it is, the other ranks wait below
                unexpected = not isinstance(error, (OSError, FillError))
                logger.warning(
                    "the run folder %s cannot be used, so nothing is filled: %s", run_dir, error, exc_info=unexpected
                )
                agreed[0] = ""
        if info.world_size > 1:
            import torch.distributed as dist

            dist.broadcast_object_list(agreed, src=0)
        self._rounds = agreed[1]
        return Path(agreed[0]) if agreed[0] else None

    def _begin(self, settings: FillSettings, run_dir: Path, info: RankInfo) -> OpenSegment:
        return begin_segment(
            run_dir,
            shlex.join(shown(argument) for argument in sys.argv),
            info.world_size,
            jobs=[job.name for job in self._jobs],
            store=shown(locate(store_of(settings, run_dir))) if settings.serves else "",
            sandbox={layer.name: layer.lacks for layer in self.sandbox.layers},
            trace_iterations=settings.trace_iterations,
            prices=settings.price,
            quota=settings.users_quota,
            warmup=settings.warmup_iterations if settings.serves else None,
            paired_blocks=settings.paired_blocks,
        )

    def finish(self) -> None:
        """End PipeFill's part after a complete training; called on every rank.  Rank 0 writes and prints the report."""
        if self._run_dir is None or self._others is None or self.settings is None:
            return
        if self._freed is not None:
            self._freed.end()
        with kept("the records of this rank are lost"):
            if self.session is not None:
                self.session.finish()
        try:
            with kept("the jobs of this rank were not measured alone"):
                measure_alone(self.session, self._rounds, self.settings.baseline_seconds, self._others)
        finally:
            with kept("the fill agent of this rank may not have ended"):
                if self.session is not None:
                    self.session.close()
        with kept("what this rank could not write down is lost"):  # every rank hands in, also one whose session failed
            self._others.hand_in(Unwritten() if self.session is None else self.session.unwritten)
        if self._segment is not None:  # on rank 0
            unwritten: dict[int, Unwritten] = {}
            with kept("what ranks could not write down is lost"):
                unwritten = self._others.collect()
            self._end(SegmentEnding.WELL)
            with kept("the report could not be made"):
                report_end(self.settings, self._run_dir, self._segment.segment, unwritten)

    def abort(self) -> None:
        """End PipeFill's part after the training has failed, and print the state of its jobs."""
        if self._run_dir is not None:  # the launcher ends all ranks when one has failed; this must finish before
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._break_off()
        if self.session is not None and self.session.settings.serves:
            with kept("it is not known where its jobs are"):
                tell_of_jobs(self.session, [job.name for job in self._jobs])

    def on_restart(self) -> None:
        """End what an earlier start in this process began, before its ranks meet again."""
        if self._run_dir is not None:
            with kept("an earlier start of this rank may not have ended"):
                self._break_off()
            self.session = self._segment = self._run_dir = self._others = self._freed = None
            bus.account.begin(time.monotonic_ns())
        self.release()

    def _break_off(self) -> None:
        if self._freed is not None:
            self._freed.end()
        if self.session is not None:
            self.session.abort()
        self._end(SegmentEnding.FAILED)

    def release(self) -> None:
        """Release the run folder, so that another training may use it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _end(self, ending: SegmentEnding) -> None:
        """Record how the segment ended, on rank 0."""
        if self._segment is not None:
            try:
                self._segment.end(ending)
            except OSError as error:
                logger.warning("how the training ended cannot be written down: %s", error)


def _counted(jobs: int, new: int) -> str:
    again = f" ({jobs - new} submitted here before: --fill-resubmit runs them anew)" if jobs > new else ""
    return counted(jobs, "job") + again


def launch(main: Callable[[], Any], patches: tuple[str, ...] | None = None) -> None:
    """Run ``main`` (a Megatron script's) with the patches applied, and PipeFill's session around it.

    For an error that a user caused (FillError), rank 0 prints one line, and the process exits with 2.

    Args:
        main: trains; returns or exits when training is over.  Inside another ``launch`` it is only called.
        patches: the names of the patches to apply; None for all that apply here.
    """
    if attached.on_start is not None:  # `python -m pipefill_patches` runs this script inside its own `launch`
        main()
        return
    never_fail_to_print()  # a message about a folder or a job must not end the training
    atexit.register(ignore_notices)  # Python's end puts the default action in the place of Megatron's handler
    bus.account.begin(process_started_ns())
    run = Launch()
    attached.on_parse, attached.on_restart, attached.on_start = run.on_parse, run.on_restart, run.on_start
    try:
        run.take_turn()
        pipefill_patches.apply(patches if patches is not None else pipefill_patches.defaults(sys.argv))
        _run(main, run)
    except RunTaken as error:
        exit_together(f"{os.path.basename(sys.argv[0])}: error: {error}")
    except FillError as error:
        exit_saying(f"{os.path.basename(sys.argv[0])}: error: {error}")
    finally:
        run.release()
        attached.on_parse = attached.on_restart = attached.on_start = None
        attached.offload_pays = attached.figures = attached.spans = None


def _run(main: Callable[[], Any], run: Launch) -> None:
    ended: SystemExit | None = None
    try:
        main()
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            run.abort()
            raise
        # Without its traceback, whose frames hold the script's data loaders: an error that is kept anywhere while this
        # one is handled would keep them too.  With --exit-signal-handler their workers ignore SIGTERM, and Python waits
        # for ever, at its end, for those of loaders that are still there.
        ended = error.with_traceback(None)
    run.finish()
    if ended is not None:
        raise ended
