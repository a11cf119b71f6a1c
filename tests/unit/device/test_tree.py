"""Processes as /proc tells of them, and what must never get a signal."""

from __future__ import annotations

import os
import subprocess
import sys

from megatron.fill.linux.tree import (
    MARK,
    Process,
    WorkerTree,
    children,
    descendants,
    marked,
    read_process,
)


def test_a_process_with_a_wild_name_is_read(tmp_path):
    folder = tmp_path / "42"
    folder.mkdir()
    middle = " ".join(str(number) for number in range(10))
    (folder / "stat").write_text(f"42 (a ) R (b) S 7 40 1 0 -1 4194304 {middle} 3 0 9999 0\n")
    assert read_process(42, str(tmp_path)) == Process(42, 7, 40, "S", 3, 9999, 4 + 5 + 6 + 7)
    assert read_process(43, str(tmp_path)) is None


def test_this_process_is_found():
    process = read_process(os.getpid())
    assert process is not None
    assert (process.parent, process.group, process.alive) == (os.getppid(), os.getpgrp(), True)


def test_what_is_gone_holds_nothing(tmp_path):
    assert children(42, str(tmp_path)) == []
    assert not marked(42, "job", str(tmp_path))


def test_descendants_are_found_through_all_threads(tmp_path):
    for pid, threads in {1: {1: "2", 10: "3 4"}, 2: {2: ""}, 3: {3: "5"}, 4: {4: ""}, 5: {5: "1"}}.items():
        for thread, below in threads.items():
            folder = tmp_path / str(pid) / "task" / str(thread)
            folder.mkdir(parents=True)
            (folder / "children").write_text(below + " ")
    assert sorted(descendants(1, proc=str(tmp_path))) == [2, 3, 4, 5]  # and a loop, by a number used anew, ends


def test_a_mark_is_whole(tmp_path):
    folder = tmp_path / "42"
    folder.mkdir()
    (folder / "environ").write_bytes(f"A=1\0{MARK}=job-12\0B=2".encode())
    assert marked(42, "job-12", str(tmp_path))
    assert not marked(42, "job-1", str(tmp_path))


def test_a_group_that_a_process_has_joined_is_not_the_worker_s():
    """The training's own group, for instance: it must not be stopped or ended with a worker."""
    code = f"import os, time; os.setpgid(0, {os.getpgrp()}); print(flush=True); time.sleep(60)"
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None
        worker.stdout.readline()
        tree = WorkerTree(worker.pid, "job")
        processes = tree.look()
        assert [process.group for process in processes] == [os.getpgrp()]
        assert tree.groups(processes) == set()
    finally:
        worker.kill()
        worker.communicate()
        tree.forget()


def test_a_number_used_anew_is_another_process():
    worker = subprocess.Popen(["sleep", "60"], process_group=0)
    tree = WorkerTree(worker.pid, "job")
    assert [process.pid for process in tree.look()] == [worker.pid]
    tree._seen[worker.pid] -= 1  # as if it had started at another time
    assert tree.look() == []
    worker.kill()
    worker.wait()
    tree.forget()
