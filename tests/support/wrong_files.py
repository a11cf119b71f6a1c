"""Wrong files as data: what is given, and after ``=>`` what the one line that answers it has to say."""

from __future__ import annotations

import json

# One job of a jobs file, after ``- ``: test_config.py has more.
JOBS = """
[] => line 2: job 1: found []: expected a mapping
just text => job 1: found 'just text': expected a mapping
null => job 1: found None: expected a mapping
{task: m:C} => job 1: name is missing
{name: 7, task: m:C} => job 1: name is 7: expected text; in quotes
{name: yes, task: m:C} => job 1: name is True: expected text; in quotes
{name: '', task: m:C} => name is '': expected 1 to 80 letters
{name: a b, task: m:C} => name is 'a b': expected 1 to 80 letters
{name: /etc/passwd, task: m:C} => name is '/etc/passwd': expected 1 to 80 letters
{name: "a\\n", task: m:C} => expected 1 to 80 letters
{name: a, name: b, task: m:C} => line 2: 'name' is there twice, also in line 2; expected it once
{name: a} => job 'a': expected exactly one of task and command
{name: a, task: m:C, command: ls} => job 'a': expected exactly one of task and command
{name: a, task: m.C} => task is 'm.C': expected module:Class
{name: a, task: 'm:C:D'} => task is 'm:C:D': expected module:Class
{name: a, task: [m, C]} => expected text
{name: a, command: ''} => command is '': expected a program
{name: a, command: ['']} => expected a program, and perhaps its arguments
{name: a, command: "gzip 'a"} => No closing quotation
{name: a, command: [sleep, 1]} => command.1 is 1: expected text; in quotes
{name: a, command: {run: ls}} => expected a command line, in quotes if it looks like a number or a switch, or a list
{name: a, command: true} => command is True: expected a command line, in quotes if it looks like a number or a switch
{name: a, command: ls, args: {x: 1}} => args belong to a task
{name: a, command: "ls \\0"} => expected text without NUL characters
{name: a, task: m:C, side_throughput: 0} => side_throughput is 0: expected greater than 0
{name: a, task: m:C, side_throughput: .inf} => line 2: .inf is not a finite number
{name: a, task: m:C, side_throughput: 40/s} => side_throughput is '40/s': expected a valid number
{name: a, task: m:C, args: [1]} => args is [1]: expected a mapping
{name: a, task: m:C, args: {1: x}} => args.1 is 1: expected text
{name: a, task: m:C, args: {x: .inf}} => line 2: .inf is not a finite number; expected one
{name: a, task: m:C, args: {x: .nan}} => line 2: .nan is not a finite number; expected one
{name: a, task: m:C, args: {x: 1e400}} => line 2: 1e400 is not a finite number; expected one
{name: a, task: m:C, args: {x: 99999999999999999999}} => is a whole number of more than 64 bits
{name: a, task: m:C, args: {x: !!python/object/apply:os.mkdir [x]}} => line 2: the tag !!python/object/apply:os.mkdir
{name: a, task: m:C, args: {x: !!binary aGk=}} => line 2: the tag !!binary; expected plain data
{name: a, task: m:C, args: {? [x] : 1}} => line 2: a key is a list, a mapping or an alias; expected a word
{name: a, task: m:C, args: *none} => line 2: *none refers to nothing above it, or to itself
{name: a, task: m:C, memory: lots} => memory is 'lots': expected a size above 0 such as 512MB or 2GiB
{name: a, task: m:C, memory: 0} => memory is 0: expected a size above 0
{name: a, task: m:C, memory: 1e400} => 1e400 is not a finite number
{name: a, task: m:C, memory: '1e400'} => memory is '1e400': expected a size above 0
{name: a, task: m:C, memory: 9999999999TiB} => memory is '9999999999TiB': expected a size above 0
{name: a, task: m:C, memory: -2GiB} => memory is '-2GiB': expected a size above 0
{name: a, task: m:C, memory: on} => memory is True: expected a size above 0
{name: a, task: m:C, env: [A]} => env is ['A']: expected a mapping
{name: a, task: m:C, env: {A: 1}} => env.A is 1: expected text; in quotes
{name: a, task: m:C, env: {A-B: x}} => env.A-B is 'A-B': expected letters, digits and '_'
{name: a, task: m:C, env: {'': x}} => expected letters, digits and '_'
{name: a, task: m:C, env: {A: "x\\0"}} => expected text without NUL characters
{name: a, task: m:C, env: {PIPEFILL_INDEX: x}} => those with PIPEFILL_ are set for each job
{name: a, task: m:C, priority: high} => priority is 'high': expected a valid integer
{name: a, task: m:C, priority: 1.5} => priority is 1.5: expected a valid integer
{name: a, task: m:C, priority: yes} => priority is True: expected a valid integer
{name: a, task: m:C, priority: 9300000000000000000} => expected less than or equal to 9223372036854775807
{name: a, task: m:C, user: 7} => user is 7: expected text; in quotes
{name: a, task: m:C, deadline: soon} => deadline is 'soon': expected such as 90s, 30m, 2h, 1d, or 2030-01-31T18:00
{name: a, task: m:C, deadline: 2026-13-45} => deadline is '2026-13-45': expected such as
{name: a, task: m:C, deadline: 2026-02-31} => deadline is '2026-02-31': expected such as
{name: a, task: m:C, deadline: 2026-02-28T25:00} => deadline is '2026-02-28T25:00': expected such as
{name: a, task: m:C, deadline: -2h} => deadline is '-2h': expected such as
{name: a, task: m:C, deadline: 99999999999999d} => deadline is '99999999999999d': expected such as
{name: a, task: m:C, deadline: 2 weeks} => deadline is '2 weeks': expected such as
{name: a, task: m:C, deadline: 90} => deadline is 90: expected such as 90s
{name: a, task: m:C, timeout: 0} => timeout is 0: expected seconds, or such as 90s, 30m, 2h or 1d, and more than 0
{name: a, task: m:C, timeout: soon} => timeout is 'soon': expected seconds, or such as 90s
{name: a, task: m:C, timeout: -1s} => timeout is '-1s': expected seconds, or such as 90s
{name: a, task: m:C, timeout: yes} => timeout is True: expected seconds, or such as 90s
{name: a, task: m:C, timeout: 1e300} => expected seconds, or such as 90s, 30m, 2h or 1d, and more than 0
{name: a, task: m:C, retries: -1} => retries is -1: expected greater than or equal to 0
{name: a, task: m:C, retries: 1001} => retries is 1001: expected less than or equal to 1000
{name: a, task: m:C, retries: twice} => retries is 'twice': expected a valid integer
{name: a, task: m:C, after: 7} => after is 7: expected a list
{name: a, task: m:C, after: [7]} => after.0 is 7: expected text; in quotes
{name: a, task: m:C, after: b c} => after.0 is 'b c': expected 1 to 80 letters
{name: a, task: m:C, after: a} => none of these could ever begin: a after a
{name: a, task: m:C, after: a-1, count: 2} => none of these could ever begin: a after a
{name: a, task: m:C, count: 0} => count is 0: expected greater than or equal to 1
{name: a, task: m:C, count: 10001} => count is 10001: expected less than or equal to 10000
{name: a, task: m:C, count: yes} => count is True: expected a valid integer
{name: a, task: m:C, count: 2.0} => count is 2.0: expected a valid integer
{name: a, task: m:C, cuont: 2} => unknown field cuont; expected one of name, task, command
{name: a, task: m:C, array: [0, 2]} => unknown field array; expected one of name
{name: a, task: m:C => is not YAML: did not find expected ',' or '}'
"""

# Of simulate's configuration: one field set to a value.  test_cli_simulate.py has more.
FIELDS = """
duration: 2026-13-45 => sim.yaml, line 1: duration is '2026-13-45': expected seconds, or such as 90s, 30m, 2h or 1d
duration: 1e400 => 1e400 is not a finite number
duration: -1h => duration is '-1h': expected seconds
duration: [1h] => duration is ['1h']
main_jobs: gpt => main_jobs is 'gpt': expected a list
main_jobs.0: gpt-40b => main_jobs.0 is 'gpt-40b': expected a mapping
main_jobs.0.model: gpt-9000b => main_jobs.0.model is 'gpt-9000b': expected one of
main_jobs.0.report: report.json => main_jobs.0: expected a report, or model, gpu, network and parallel; got both
main_jobs.0.stragglers: {a: 2} => main_jobs.0.stragglers.a is 'a': expected a valid integer
main_jobs.0.efficiency: high => main_jobs.0.efficiency is 'high': expected a valid number
main_jobs.0.parallel.pp: 0 => main_jobs.0.parallel: pp is 0; expected at least 1
main_jobs.0.parallel.precision: fp7 => main_jobs.0.parallel.precision is 'fp7': expected
main_jobs.0.parallel.deep: 1 => unknown field main_jobs.0.parallel.deep; expected one of tp, pp, dp
main_jobs.0.parallel: {pp: 2, pp: 4} => 'pp' is there twice
fill.kinds: [] => fill.kinds is []
fill.knids: [] => unknown field fill.knids; expected one of kinds, gpu, profiles
fill.generate.sigma: -1 => fill.generate: sigma is -1.0; expected 0 to 10
fill.generate.jobs: 1000000000000 => fill.generate makes 1000000000000 jobs; expected at most 10000000
fill.gpu: abacus => fill.gpu is 'abacus': expected one of
fill.trace: none.csv => expected exactly one of trace, jobs, store, generate, saturate; got trace and generate
policies: [] => policies is []
policies: fifo => policies is 'fifo': expected a list
runtime.harvest: 0 => runtime.harvest is 0: expected greater than 0
runtime.step_efficiency: 1.5 => runtime.step_efficiency is 1.5: expected less than or equal to 1
runtime.margin: lots => runtime.margin is 'lots': expected a size above 0
runtime.checkpoint: 0 => runtime.checkpoint is 0: expected greater than 0
failures.mtbf: never => failures.mtbf is 'never': expected seconds, or such as
failures.seed: -1 => failures.seed is -1: expected greater than or equal to 0
price_per_gpu_hour: -1 => price_per_gpu_hour is -1: expected greater than or equal to 0
cluster: big => sim.yaml, line 1: unknown field cluster; expected one of duration, main_jobs, fill
"""

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
BUBBLE = {"kind": "fill", "p10_ms": 30.0, "free_bytes": 0}
RANK = {"rank": 0, "iteration_ms": 100.0, "training": [BUBBLE]}
NODE = {"name": "f", "duration_ns": 1000, "memory_bytes": 10}
PROFILE = {"configuration": "b1", "work": 1, "nodes": [NODE]}


def bubbles(**changed: object) -> str:
    return json.dumps({"ranks": [RANK | changed]})


def profiles(**changed: object) -> str:
    return json.dumps({"a": [PROFILE | changed]})


# Whole files: a call of which {} is the file, its text, and what is said.
TEXTS: list[tuple[str, str, str]] = [
    *(
        (call, text, said)
        for call in ("submit {} --store s.db", "simulate {}")
        for text, said in (
            ("", "found None; expected a mapping"),
            ("7", "found 7; expected a mapping"),
            ("a: [", "is not YAML: did not find expected node content"),
            ("a: 1\na: 2", "line 2: 'a' is there twice, also in line 1; expected it once"),
            ("a: {b: 1, 'b': 2}", "line 1: 'b' is there twice"),
            ("a: " + "[" * 3000 + "]" * 3000, "line 1: is nested deeper than 32 levels"),
            ("[" * 200_000, "line 1: is nested deeper than 32 levels"),
            ("{a: " * 3000 + "}" * 3000, "line 1: is nested deeper than 32 levels"),
            ("- " * 3000 + "x", "line 1: is nested deeper than 32 levels"),
            ("a: " + "9" * 5000, "line 1: a number of 5000 digits; expected one of 64 bits"),
            ("a: &a [*a]", "line 1: *a refers to nothing above it, or to itself"),
            ("a: 1\n---\nb: 2", "line 2: has a second document; expected one"),
            ("a: \x00", "is not YAML: unacceptable character"),
            ("\ta: 1", "line 1: is not YAML: found character that cannot start any token"),
            (BOMB, "line 6: has more than 1000000 values, its aliases followed"),
        )
    ),
    ("submit {} --store s.db", "jobs: {a: 1}", "found {'jobs': {'a': 1}}; expected a mapping with a list under 'jobs'"),
    ("submit {} --store s.db", "jobs: []", "jobs is []; expected at least one job"),
    ("submit {} --store s.db", "Jobs: [{name: a, command: ls}]", "expected a mapping with a list under 'jobs'"),
    (
        "submit {} --store s.db",
        "jobs:\n" + "".join(f"- {{name: a{n}, command: ls, count: 10000}}\n" for n in range(11)),
        "there are 110000 jobs, all instances counted; expected at most 100000",
    ),
    (
        "submit {} --store s.db",
        "jobs: [{name: a, command: pwd}]",
        "the name 'a' is in use by the QUEUED job 1, which is another one; expected another name",
    ),
    ("simulate {}", "{duration: 1d, fill: {saturate: true}}", "main_jobs is missing"),
    *(
        ("plan jobs.yaml --profiles p.json --bubbles {}", text, said)
        for text, said in (
            ("", "is not JSON: Expecting value"),
            ("{", "is not JSON: "),
            ("NaN", "is not JSON: NaN is not a JSON number"),
            ("[" * 100_000, "is not JSON: the JSON text is nested deeper than 64"),
            ('{"ranks": [], "ranks": []}', "'ranks' is there twice in one object; expected it once"),
            ("{}", "ranks is missing"),
            ('{"ranks": []}', "ranks is empty"),
            ('{"ranks": 7}', "ranks is 7: expected a list"),
            (bubbles(rank="first"), "ranks.0.rank is 'first': expected a valid integer"),
            (bubbles(iteration_ms=0), "ranks.0.iteration_ms is 0: expected greater than 0"),
            (bubbles(iteration_ms=None), "ranks.0.iteration_ms is null: expected the time of an iteration"),
            (bubbles(iteration_ms=1e300), "ranks.0.iteration_ms is 1e+300: expected less than or equal to"),
            (bubbles(training=[BUBBLE | {"kind": "soap"}]), "ranks.0.training.0.kind is 'soap': expected 'fill', "),
            (bubbles(training=[BUBBLE | {"p10_ms": -1}]), "ranks.0.training.0.p10_ms is -1: expected greater than"),
            (bubbles(training=[BUBBLE | {"free_bytes": 0.5}]), "ranks.0.training.0.free_bytes is 0.5: expected"),
        )
    ),
    *(
        ("plan jobs.yaml --bubbles b.json --profiles {}", text, said)
        for text, said in (
            ("[]", "found a list; expected a list of profiles per job name"),
            ("[" * 100_000, "is not JSON: the JSON text is nested deeper than 64"),
            ('{"a": 7}', "job 'a': "),
            (profiles(configuration="fast"), "job 'a': "),
            (profiles(work=0), "job 'a': "),
            (profiles(work=1).replace('"work": 1', '"work": 1e400'), "1e400 is larger than any number"),
            ('{"a": ' + "9" * 5000 + "}", "9 is a whole number of more than 64 bits"),
            (profiles(nodes=[]), "job 'a': b1: expected a list of 1 to 65536 nodes"),
            (profiles(nodes=[NODE | {"duration_ns": -1}]), "job 'a': duration_ns is -1; expected a whole number"),
            (profiles(nodes=[NODE | {"duration_ns": 0}]), "job 'a': b1: all nodes take 0 ns"),
        )
    ),
    *(
        ("simulate --from {}", text, said)
        for text, said in (
            ("", "is not JSON: Expecting value"),
            ("[" * 100_000, "is not JSON: the JSON text is nested deeper than 64"),
            ("[]", "found []: expected a mapping; expected a report.json"),
            ("{}", "ranks is missing; expected a report.json, or the file of --fill-profile-only"),
            ('{"cycle": []}', "cycle is empty; expected at least one rank"),
            (bubbles(), "(and 8 more such problems)"),
        )
    ),
]
