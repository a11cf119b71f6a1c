"""Wrong calls and flags as data: what is given, and after ``=>`` what the one line that answers it has to say."""

from __future__ import annotations

# Of the files in FILES, in a folder without PIPEFILL_STORE; s.db is a store with the job ``a``.
CALLS = """
bogus => No such command 'bogus'. Did you mean 'logs'?
--bogus => No such option: --bogus
'' => argument 1 is empty; expected a value
submit => Missing argument 'JOBS.yaml'
submit none.yaml => none.yaml: cannot be read: No such file or directory; expected a YAML file with a list of jobs
submit folder => folder: cannot be read: Is a directory
submit latin.yaml --store new.db => latin.yaml: cannot be read: is not UTF-8 text
submit '' => argument 2 is empty
submit jobs.yaml => no job store given; expected --store URL, FILE or FOLDER, or PIPEFILL_STORE
submit jobs.yaml --store '' => argument 4 is empty
submit jobs.yaml --store ' ' => the job store is given as ' '; expected sqlite:///FILE
submit jobs.yaml --store mysql://ada:secret@db/x => 'mysql://ada:***@db/x' is a database of another kind (mysql)
submit jobs.yaml --store bogus://x => is a database of another kind (bogus)
submit jobs.yaml --store sqlite:// => 'sqlite://' names no file
submit jobs.yaml --store postgresql://u@127.0.0.1:port/db => is not a database URL; expected sqlite:///FILE
submit jobs.yaml --store postgresql://u@127.0.0.1:99999/db => invalid port number
submit jobs.yaml --store postgresql://u@127.0.0.1:1/db => Connection refused
submit jobs.yaml --store /proc/new.db => /proc/new.db: cannot be made
submit jobs.yaml --store jobs.yaml/s.db => s.db: cannot be made
submit jobs.yaml --store jobs.yaml => file is not a database
submit jobs.yaml --store s.db --user '' => argument 6 is empty
submit jobs.yaml s.db => Got unexpected extra argument(s) (s.db)
submit jobs.yaml --stroe s.db => No such option: --stroe
submit jobs.yaml --store => Option '--store' requires an argument
list => no job store given
list --store nowhere => there is no job store
list --store folder => folder/jobs.db; expected a database file, or a folder with one
list --store jobs.yaml => file is not a database
list --store s.db --state odd => 'odd' is not one of 'queued', 'running'
list --store s.db extra => Got unexpected extra argument(s) (extra)
show --store s.db => Missing argument 'JOB'
show --store s.db b => there is no job 'b'
show --store s.db aa => there is no job 'aa'; the closest: a
show --store s.db 99 => there is no job '99'
show --store s.db -1 => No such option: -1
show --store s.db 99999999999999999999999999 => there is no job '99999999999999999999999999'
cancel --store s.db => Missing argument 'JOB...'
cancel --store s.db b c => there is no job 'b'; there is no job 'c'
retry --store s.db b => there is no job 'b'
retry --store s.db a => job a (1) is QUEUED; expected a FAILED or CANCELLED job
logs --store s.db b => there is no job 'b'
logs --store s.db a => job a (1) is QUEUED and has printed nothing yet; -f waits for it
logs --store s.db a --lines -1 => '--lines' / '-n': expected greater than or equal to 0
logs --store s.db a --lines few => '--lines' / '-n': expected a valid integer
logs --store s.db a --lines 1e3 => '--lines' / '-n': expected a valid integer
pause => Missing argument 'RUN'
pause nowhere => nowhere: no such folder; expected the run folder that the training printed
pause jobs.yaml => jobs.yaml: no such folder; expected the run folder
pause folder => folder: none of its ranks runs on this node
pause {long} => File name too long
resume nowhere => nowhere: no such folder
drain folder extra => Got unexpected extra argument(s) (extra)
kill folder => none of its ranks runs on this node
status '' => argument 2 is empty
status /proc => /proc: none of its ranks runs on this node
profile => Missing argument 'JOBS'
profile none.yaml --device cpu => none.yaml: cannot be read
profile jobs.yaml --device tpu => --device is 'tpu': expected cpu or cuda:0
profile jobs.yaml --device cuda => --device is 'cuda': expected cpu or cuda:0
profile jobs.yaml --device cuda:x => --device is 'cuda:x': expected cpu or cuda:0
profile jobs.yaml --device cuda:-1 => --device is 'cuda:-1': expected cpu or cuda:0
profile jobs.yaml --device cuda:999 => --device is 'cuda:999', which is not there
profile jobs.yaml --device cpu -o jobs.yaml/p.json => --output jobs.yaml/p.json: cannot be written
profile jobs.yaml --device cpu -o folder => --output folder: cannot be written: Is a directory; expected a file
profile jobs.yaml --device cpu -o /proc/p.json => --output /proc/p.json: cannot be written
profile jobs.yaml --device cpu --store mysql://x/y => is a database of another kind (mysql)
plan => Missing argument 'JOBS'
plan jobs.yaml => Missing option '--bubbles'
plan jobs.yaml --bubbles b.json => no profiles given; expected --profiles FILE, or --store
plan jobs.yaml --bubbles none.json --profiles p.json => none.json: cannot be read
plan jobs.yaml --bubbles b.json --profiles none.json => none.json: cannot be read
plan jobs.yaml --bubbles b.json --store nowhere => there is no job store
plan jobs.yaml --bubbles b.json --profiles p.json --rank 9 => --rank is 9: expected one of 0
plan jobs.yaml --bubbles b.json --profiles p.json --rank one => '--rank': expected a valid integer
plan jobs.yaml --bubbles b.json --profiles p.json --memory-margin-mib nan => '--memory-margin-mib': expected
plan jobs.yaml --bubbles b.json --profiles p.json --memory-margin-mib inf => '--memory-margin-mib': expected
plan jobs.yaml --bubbles b.json --profiles p.json --memory-margin-mib -1 => '--memory-margin-mib': expected greater
plan jobs.yaml --bubbles b.json --profiles p.json --memory-margin-mib 1e300 => '--memory-margin-mib': expected less
plan jobs.yaml --bubbles b.json --profiles p.json --png folder => --png folder: cannot be written: Is a directory
plan jobs.yaml --bubbles b.json --profiles p.json --png /proc/p.png => --png /proc/p.png: cannot be written
report => Missing argument 'RUN'
report folder --price => Option '--price' requires an argument
report folder --price 4 => --price is '4': expected what an hour costs, each above 0, such as main=3.96,side=0.18
report folder --price main=4 => --price is 'main=4': expected what an hour costs
report folder --price main=4,side=0 => --price is 'main=4,side=0': expected what an hour costs, each above 0
report folder --price main=4,side=1,main=3 => --price is 'main=4,side=1,main=3': expected what an hour costs
report folder --price main=4,side=1,tax=1 => --price is 'main=4,side=1,tax=1': expected what an hour costs
report folder --price main=nan,side=1 => --price is 'main=nan,side=1': expected what an hour costs
batch none.jsonl --model folder => none.jsonl: cannot be read: No such file or directory; expected a batch file
batch jobs.yaml --model folder => jobs.yaml, line 1: the line is not JSON
speccheck odd => RULE is 'odd': expected matching, multi_step, traversal, or module:function
speccheck no.such:rule => No module named 'no'; expected matching
speccheck math:pi => RULE is 'math:pi', a float; expected a function
speccheck --draft odd => --draft is 'odd': expected module:function
speccheck --quick tests.wings.llm.test_llm_speccheck:broken => IndexError: no leaf; expected the tokens of a path
configure => Missing argument 'CLUSTER'
configure none.yaml -- --num-layers 2 => --hidden-size is missing
configure jobs.yaml => Missing argument
configure jobs.yaml --png => Option '--png' requires an argument
configure jobs.yaml -- --num-layers 2 --hidden-size 8 --num-attention-heads 3 => --seq-length is missing
configure jobs.yaml --memory-model => Option '--memory-model' requires an argument
memory-model => Missing argument 'PEAKS'
memory-model p.json => Missing option '--output'
memory-model none.json --output m.json => none.json: cannot be read: No such file or directory
memory-model b.json --output m.json => b.json: found {
pays -- 7 => '7' belongs to no flag
pays -- --num-layers two => --num-layers is 'two': expected a whole number above 0
simulate => expected a CONFIG file, or --from with a report.json
simulate none.yaml => none.yaml: cannot be read
simulate jobs.yaml --from b.json => expected a CONFIG file, or --from
simulate sim.yaml --gpus 8 => expected a CONFIG file, or --from
simulate --from none.json => none.json: cannot be read
simulate --from folder => folder: cannot be read: Is a directory
simulate --from b.json --gpus 0 => '--gpus': expected greater than or equal to 1
simulate --from b.json --gpus many => '--gpus': expected a valid integer
simulate sim.yaml --policy '' => argument 4 is empty
simulate sim.yaml --policy fastest => policy 'fastest': 'fastest' is none of fifo, sjf
simulate sim.yaml --policy 0*fifo => weight '0'; expected a number above 0
simulate sim.yaml --policy nan*fifo => weight 'nan'; expected a number above 0
simulate sim.yaml --policy fifo+ => policy 'fifo+': '' is none of fifo
simulate sim.yaml --policy .here:f => cannot import .here:f
simulate sim.yaml --policy os:nothing => cannot import os:nothing
simulate sim.yaml --policy os:sep => os:sep is '/'; expected a function of (job, state, device)
simulate sim.yaml --sweep dp => --sweep is 'dp': expected FIELD=VALUE,VALUE
simulate sim.yaml --sweep dp= => --sweep is 'dp=': expected FIELD=VALUE,VALUE
simulate sim.yaml --sweep =8 => --sweep is '=8': expected FIELD=VALUE,VALUE
simulate sim.yaml --sweep 'dp=[8' => --sweep is 'dp=[8': expected FIELD=VALUE,VALUE
simulate sim.yaml --sweep dp=2026-13-45 => main_jobs.0.parallel.dp is '2026-13-45': expected a valid integer
simulate sim.yaml --sweep dp=1.5 => main_jobs.0.parallel.dp is 1.5: expected a valid integer
simulate sim.yaml --sweep dp=8 --sweep dp=16 => --sweep names a field twice
simulate sim.yaml --sweep no.where=1 => there is no no in the configuration
simulate sim.yaml --sweep main_jobs.7.name=x => there is no main_jobs.7 in the configuration
simulate sim.yaml --price nan => '--price': expected
simulate sim.yaml --price inf => '--price': expected less than
simulate sim.yaml --price -1 => '--price': expected greater than or equal to 0
simulate sim.yaml --price dear => '--price': expected a valid number
simulate sim.yaml --processes 0 => '--processes': expected greater than or equal to 1
simulate sim.yaml --csv folder => --csv folder: cannot be written: Is a directory
simulate sim.yaml --png jobs.yaml/p.png => --png jobs.yaml/p.png: cannot be written
network => expected --output FILE, or a file that was MEASURED before
network none.json --png n.png => none.json: cannot be read: No such file or directory
network b.json --png n.png => b.json: bandwidth_bytes_per_s is missing; expected a file that pipefill network has
network b.json => expected --png or --compare with MEASURED
network b.json --output n.json => expected no --output and no --csv with it
network --output n.json => cannot measure: RANK is not set; expected to be started in every rank, by torchrun or srun
network --output folder => --output folder: cannot be written: Is a directory
network --output n.json --sizes 8 => --sizes is '8': expected two sizes or more
network --output n.json --sizes 8,lots => --sizes is '8,lots': expected a size above 0
network --output n.json --repeats 0 => '--repeats': expected greater than or equal to 1
network --output n.json --backend mpi => 'mpi' is not one of 'gloo', 'nccl'
network --output n.json --compare b.json => b.json: bandwidth_bytes_per_s is missing
doctor extra => Got unexpected extra argument(s) (extra)
doctor --jsno => No such option: --jsno
chaos --faults 0 => '--faults' / '-n': expected greater than or equal to 1
chaos --faults many => '--faults' / '-n': expected a valid integer
chaos --iterations 10 => '--iterations': expected greater than or equal to 150
chaos --seed x => '--seed': expected a valid integer
chaos --kinds gremlins => --kinds names gremlins; expected some of
chaos --script none.py => no training script none.py; expected --script PATH
chaos --json folder => --json folder: cannot be written: Is a directory
chaos --json /proc/c.json => --json /proc/c.json: cannot be written
chaos --keep /proc/chaos => expected a new folder that can be written
chaos --keep /proc => --keep /proc is not empty; expected a new folder
chaos --keep jobs.yaml => --keep jobs.yaml: File exists; expected a new folder
"""

# The flags of a training, of which the parser or the settings take exception.
FLAGS = """
--fill-job jobs.yaml => unrecognized arguments: --fill-job jobs.yaml; did you mean --fill-jobs?
--fill-jobs => argument --fill-jobs: expected one argument
--fill-jobs none.yaml => none.yaml: cannot be read: No such file or directory
--fill-jobs '' => --fill-jobs is '': expected a jobs file
--fill-jobs twice.yaml => twice.yaml, line 2: 'name' is there twice, also in line 2; expected it once
--fill-store '' => --fill-store is '': expected a database URL, a database file or a run folder
--fill-store ' ' => --fill-store is ' ': expected a database URL
--fill-store postgresql://ada:secret@db/x => --fill-store postgresql://ada:***@db/x: its password would be in ps
--fill-store postgresql://ada@db/x?password=secret => ?password=***: its password would be in ps
--fill-store mysql://ada:secret@db/x => 'mysql://ada:***@db/x' is a database of another kind (mysql)
--fill-report '' => --fill-report is '': expected a folder
--fill-report jobs.yaml => --fill-report jobs.yaml: File exists; expected a folder that can be written
--fill-report /proc/run => expected a folder that can be written
--fill-policy '' => policy '': '' is none of fifo, sjf
--fill-policy fastest => policy 'fastest': 'fastest' is none of fifo
--fill-policy inf*fifo => weight 'inf'; expected a number above 0
--fill-policy ..up:f => cannot import ..up:f
--fill-profile-only yes => unrecognized arguments: yes
--fill-profile-only --fill-jobs jobs.yaml => expected no --fill-jobs with it
--fill-profile-only --fill-store s.db => expected no --fill-store with it
--fill-pipeline-schedule zigzag => argument --fill-pipeline-schedule: invalid choice: 'zigzag'
--fill-rank-order '' => --fill-rank-order is '': expected a file
--fill-rank-order none.json => none.json: cannot be read: No such file or directory; expected {"order": [...]}
--fill-rank-order b.json => b.json: found {
--fill-paired-blocks -1 => --fill-paired-blocks is -1: expected greater than or equal to 0
--fill-paired-blocks 1.5 => argument --fill-paired-blocks: invalid int value: '1.5'
--fill-paired-blocks 99999999999999999999 => --fill-paired-blocks is 99999999999999999999: expected less than
--fill-warmup-iterations 0 => --fill-warmup-iterations is 0: expected greater than or equal to 1
--fill-warmup-iterations five => argument --fill-warmup-iterations: invalid int value: 'five'
--fill-emulate nothing => argument --fill-emulate: invalid choice: 'nothing'
--fill-guard-us inf => --fill-guard-us is inf: expected a finite number
--fill-guard-us nan => --fill-guard-us is nan: expected a finite number
--fill-guard-us -1 => --fill-guard-us is -1.0: expected greater than or equal to 0
--fill-overrun 101 => --fill-overrun is 101.0: expected less than or equal to 100
--fill-overrun -1 => --fill-overrun is -1.0: expected greater than or equal to 0
--fill-guard-us 1e300 => --fill-guard-us is 1e+300: expected less than or equal to 1000000000
--fill-guard-us much => argument --fill-guard-us: invalid float value: 'much'
--fill-guard-us '' => argument --fill-guard-us: invalid float value: ''
--fill-min-bubble-us inf => --fill-min-bubble-us is inf: expected a finite number
--fill-min-bubble-us -5 => --fill-min-bubble-us is -5.0: expected greater
--fill-grace-ms inf => --fill-grace-ms is inf: expected a finite number
--fill-grace-ms nan => --fill-grace-ms is nan: expected a finite number
--fill-grace-ms 0 => --fill-grace-ms is 0.0: expected greater than 0
--fill-max-overruns 0 => --fill-max-overruns is 0: expected greater than or equal to 1
--fill-max-output-mib inf => --fill-max-output-mib is inf: expected a finite number
--fill-max-output-mib 0 => --fill-max-output-mib is 0.0: expected greater than 0
--fill-checkpoint-seconds inf => --fill-checkpoint-seconds is inf: expected a finite number
--fill-checkpoint-seconds -300 => --fill-checkpoint-seconds is -300.0: expected greater than 0
--fill-lease-seconds inf => --fill-lease-seconds is inf: expected a finite number
--fill-lease-seconds nan => --fill-lease-seconds is nan: expected a finite number
--fill-lease-seconds 0.5 => --fill-lease-seconds is 0.5: expected greater than or equal to 1
--fill-max-slowdown inf => --fill-max-slowdown is inf: expected a finite number
--fill-max-slowdown 1% => argument --fill-max-slowdown: invalid float value: '1%'
--fill-memory-margin-mib inf => --fill-memory-margin-mib is inf: expected a finite number
--fill-memory-margin-mib 1GiB => argument --fill-memory-margin-mib: invalid float value: '1GiB'
--fill-sharing always => argument --fill-sharing: invalid choice: 'always'
--fill-mps-pipe '' => --fill-mps-pipe is '': expected a folder
--fill-store s.db --fill-mps-pipe /tmp => expected --fill-sharing mps with it
--fill-sm-percentage 0 => --fill-sm-percentage is 0: expected greater than or equal to 1
--fill-sm-percentage 101 => --fill-sm-percentage is 101: expected less than or equal to 100
--fill-user '' => --fill-user is '': expected the name of a user
--fill-store s.db --fill-user no-such-user => --fill-user is 'no-such-user': there is no such user
--fill-store s.db --fill-user 0 => --fill-user is '0', which is root; expected a user with fewer rights
--fill-bind => argument --fill-bind: expected at least one argument
--fill-store s.db --fill-bind data => --fill-bind data: expected an absolute path
--fill-store s.db --fill-bind /no/where => --fill-bind /no/where: there is no /no/where
--fill-store s.db --fill-bind /:rw => --fill-bind /:rw: expected a folder for the jobs, not the whole machine
--fill-allow '' => --fill-allow is '': expected a pattern
--fill-max-processes 7 => --fill-max-processes is 7: expected greater than or equal to 8
--fill-max-files 63 => --fill-max-files is 63: expected greater than or equal to 64
--fill-max-files many => argument --fill-max-files: invalid int value: 'many'
--fill-baseline-seconds inf => --fill-baseline-seconds is inf: expected a finite number
--fill-baseline-seconds -1 => --fill-baseline-seconds is -1.0: expected greater than or equal to 0
--fill-price => argument --fill-price: expected one argument
--fill-price '' => --fill-price is '': expected what an hour costs, each above 0, such as main=3.96,side=0.18
--fill-price 3.96 => --fill-price is '3.96': expected what an hour costs
--fill-price main=3.96 => --fill-price is 'main=3.96': expected what an hour costs
--fill-price main=3.96,side= => --fill-price is 'main=3.96,side=': expected what an hour costs
--fill-price main=3.96,side=-1 => --fill-price is 'main=3.96,side=-1': expected what an hour costs, each above 0
--fill-price main=inf,side=1 => --fill-price is 'main=inf,side=1': expected what an hour costs, each above 0
--fill-price main=$4,side=$1 => --fill-price is 'main=$4,side=$1': expected what an hour costs
--fill-trace-iterations 0 => --fill-trace-iterations is 0: expected greater than or equal to 1
--fill-offload-optimizer => expected --bf16 or --fp16
--fill-gpu-backend => unrecognized arguments: --fill-gpu-backend; did you mean --fill-cpu-backend?
"""

# Calls of scripts; r.json holds something else than their figures, and real-time priorities are refused.
SCRIPTS = """
gpu_identity.py --iterations 1 => argument --iterations: 1: expected 5 to 10000
gpu_identity.py --most-seconds 0 => argument --most-seconds: 0: expected above 0
gpu_identity.py --stages 3 => argument --stages: invalid choice: 3
gpu_identity.py --device cpu --sharing mps => argument --sharing: mps needs a GPU; expected timeslice
gpu_look.py --json folder => argument --json: folder: Is a directory; expected a file that can be written
carried.py --extras odd => argument --extras: invalid choice: 'odd'
carried.py --has none.txt => argument --has: none.txt: No such file or directory
gpu_micro.py --parts odd => argument --parts: invalid choice: 'odd'
gpu_micro.py --seconds 0 => argument --seconds: 0: expected 0.1 to 60
gpu_micro.py --seconds nan => argument --seconds: nan: expected 0.1 to 60
gpu_micro.py --marks 0 => argument --marks: 0: expected 1 to 100000
gpu_micro.py --json folder => argument --json: folder: Is a directory; expected a file that can be written
bench_llm.py --parts room_equal --against folder => --against folder: expected a checkout of PipeFill
bench_main.py --parts odd => argument --parts: invalid choice: 'odd'
bench_main.py --parts filled --pairs 0 => --pairs is 0: expected at least 1
bench_main.py --parts filled --block -1 => --block is -1: expected at least 1
bench_main.py --parts filled --warmup few => argument --warmup: invalid int value: 'few'
bench_main.py --parts filled --step-ms 10 => expected none of --parts filled with it
bench_main.py --parts emulated --step-ms 0 => --step-ms is 0: expected above 0, and 1000 at most
bench_main.py --parts emulated --step-ms nan => --step-ms is nan: expected above 0, and 1000 at most
bench_main.py --parts emulated-freeride => --parts emulated-freeride: real-time priorities are refused here
bench_main.py --parts filled --json r.json => it holds something else than the figures of such a call
bench_main.py --parts filled --json folder => Is a directory
bench_fill.py --parts odd => argument --parts: invalid choice: 'odd'
bench_fill.py --parts cpu --pairs 0 => --pairs is 0: expected at least 1
bench_fill.py --parts cpu --baseline-seconds nan => --baseline-seconds is nan: expected 0 to 600
bench_fill.py --parts emulated => --parts emulated: real-time priorities are refused here
bench_fill.py --parts cpu --json none/r.json => No such file or directory
lateness.py nowhere => nowhere/records: holds no records of a training; expected a run folder
lateness.py nowhere --block 0 => expected at least 1 for --block and 0 for --warmup
sim_overrun.py nowhere => nowhere/records: holds no records of a training; expected a run folder
sim_overrun.py nowhere --steps-ms 0 => expected steps above 0 ms
sim_slices.py --steps-ms 0 => expected steps, slices and a transfer above 0 ms
sim_slices.py --noise-ms -1 => expected neither guards nor noise below 0 ms
bench_gpu.py --parts odd => argument --parts: invalid choice: 'odd'
bench_gpu.py --device cuda => argument --device: invalid choice: 'cuda'
bench_gpu.py --pairs 0 => --pairs is 0: expected at least 1
bench_gpu.py --stages 1 => --stages is 1: expected at least 2
bench_gpu.py --stage 4 => --stage is 4: expected 0 to 3
bench_gpu.py --stages 5 --microbatches 10 => --stages is 5: expected stages that share 24 layers evenly
bench_gpu.py --microbatches 6 => --microbatches is 6: expected a multiple of --stages, 4
bench_gpu.py --budget-seconds nan => --budget-seconds is nan: expected 0 to 1e+06
bench_gpu.py --startup-seconds -1 => --startup-seconds is -1: expected 0 to 3600
bench_gpu.py --guard-us -1 => --guard-us is -1: expected 0 to 1e+09
bench_gpu.py --memory much => --memory is 'much'
bench_gpu.py --device cpu --waits stream => --device cpu has no MPS and no streams
bench_gpu.py --device cpu --json r.json => it holds something else than the figures of such a call
bench_gate.py --bubbles 0 => --bubbles is 0: expected at least 1
bench_gate.py --step-ms 2 0 => --step-ms is 0: expected above 0, and 10000 at most
bench_gate.py --lengths-ms inf => --lengths-ms is inf: expected above 0, and 10000 at most
"""
