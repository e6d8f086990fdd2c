"""The first error in causal order is named, across the logs of many ranks."""

from coalign_diagnose.logs import LogFile, parse_time, split_tags
from coalign_diagnose.report import to_json, write_report
from coalign_diagnose.verdict import judge
from packages.diagnose.tests.samples import judge_text, name_cause

OOM = (
    'Traceback (most recent call last):\n  File "/home/me/train.py", line 12, in main\n    loss.backward()\n'
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
)


def timeout(rank, sequence=7, operation="ALLREDUCE", time="10:30:00.000001"):
    return (
        f"[rank{rank}]:[E310 {time} ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation "
        f"timeout: "
        f"WorkNCCL(SeqNum={sequence}, OpType={operation}, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600088 "
        "milliseconds before timing out.\n"
    )


def files(**texts):
    return [LogFile(f"{name}.log", text.encode(), 2026) for name, text in texts.items()]


def test_the_cause_of_one_rank_is_named_before_the_timeouts_of_the_others():
    broken = {"rank2": f"2026-03-10 10:20:00 INFO step 4\n{OOM}", "rank3": "Broken pipe\n" + timeout(3)}
    verdict = judge(files(rank0=timeout(0), rank1=timeout(1), **broken))
    assert name_cause(verdict) == "device-memory-backward" and verdict.origin.rank == 2
    assert [name.rule.id for name in verdict.candidates] == ["nccl-timeout"]


def test_of_two_causes_in_two_files_the_earlier_is_named_and_of_one_file_the_first():
    full = "{} ERROR OSError: [Errno 28] No space left on device: '/x'\n"
    early, late = full.format("2026-03-10 10:00:00,000"), f"2026-03-10 10:05:00,000 INFO x\n{OOM}"
    for logs in (files(a=late, b=early), files(b=early, a=late), files(one=early + late)):
        assert name_cause(judge(logs)) == "disk-full"
    assert "5 different" not in write_report(judge(files(a=late, b=early)), [])
    assert "300.0 s before the next" in write_report(judge(files(a=late, b=early)), files(a=late))


def test_a_broken_card_explains_errors_that_were_written_before_it():
    xid = "[Tue Mar 10 10:00:02 2026] NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus.\n"
    error = "2026-03-10 10:00:01 ERROR RuntimeError: CUDA error: unspecified launch failure\n"
    assert name_cause(judge(files(rank0=error, dmesg=xid))) == "gpu-off-the-bus"


def test_an_error_that_the_run_survived_is_none():
    steps = "".join(f"step {i} loss 0.5\n" for i in range(5))
    assert name_cause(judge_text(OOM + steps)) is None
    assert judge_text(OOM + steps).passed == 1
    assert name_cause(judge_text(OOM + steps + timeout(0))) == "nccl-timeout"
    assert name_cause(judge_text(steps + OOM)) == "device-memory-backward"


def test_effects_alone_are_never_named_first():
    leak = "resource_tracker: There appear to be 1 leaked semaphore objects\n"
    effects = f"BrokenPipeError: [Errno 32] Broken pipe\n{leak}"
    assert name_cause(judge_text(effects + OOM + effects)) == "device-memory-backward"
    assert name_cause(judge_text(effects)) in (None, "unknown")
    assert name_cause(judge_text(f"step 1 loss 2\n{leak}")) is None


def test_of_a_chain_the_more_exact_exception_is_named():
    chain = (
        'Traceback (most recent call last):\n  File "/x/site-packages/requests/m.py", line 1, in raise_for_status\n'
        "    raise HTTPError()\nrequests.exceptions.HTTPError: 401 Client Error: Unauthorized for url: https://h.co/x\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "/x/site-packages/huggingface_hub/f.py", line 1, in get\n'
        "    meta = get()\nhuggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: 1)\n"
    )
    assert name_cause(judge_text(chain)) == "hub-gated"


def test_the_rank_that_others_waited_for_is_named():
    others = {f"rank{i}": timeout(i) for i in (0, 1, 3)}
    absent = judge(files(**others, rank2="2026-03-10 10:19:00 INFO saving the model\n"))
    assert name_cause(absent) == "nccl-timeout" and absent.origin.rank == 2
    assert absent.evidence[-1] == ("rank2.log:1", "2026-03-10 10:19:00 INFO saving the model")
    other = judge(files(**{f"rank{i}": timeout(i, operation="BROADCAST" if i == 1 else "ALLREDUCE") for i in range(4)}))
    assert other.origin.rank == 1 and any("called BROADCAST" in reason for reason in other.reasons)
    behind = judge_text("".join(timeout(i, 9 if i else 8) for i in range(4)))
    assert behind.origin.rank == 0
    alike = judge_text("".join(timeout(i) for i in range(4)))
    assert any("all 4 ranks" in reason for reason in alike.reasons)


def test_an_unknown_exception_is_shown_with_the_innermost_frame_of_own_code():
    text = (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 7, in main\n    fit(model)\n'
        '  File "/x/site-packages/some/fit.py", line 3, in fit\n    raise OddError("odd")\nsome.OddError: odd\n'
    )
    verdict = judge_text(text)
    assert name_cause(verdict) == "unknown" and verdict.evidence[1] == ("/home/me/train.py:7", "in main")
    assert verdict.sure == "possible" and "OddError: odd" in write_report(verdict, [])


def test_processes_are_told_apart_where_their_lines_are_mixed():
    lines = []
    for rank, error in enumerate(("ValueError: first", "KeyError: 'zweites'")):
        frame = f'  File "/home/me/r{rank}.py", line 5, in main'
        trace = ("Traceback (most recent call last):", frame, "    x()", error)
        lines.append([f"[rank{rank}]: {line}" for line in trace])
    mixed = "\n".join(line for pair in zip(*lines, strict=True) for line in pair) + "\n"
    verdict = judge_text(mixed)
    assert name_cause(verdict) == "user-code" and verdict.origin.rank == 0
    assert verdict.evidence[1][0] == "/home/me/r0.py:5"


def test_the_worker_is_named_where_the_error_of_a_call_was_raised():
    text = f"future.WorkerError: trainer.train_step failed in trainer, rank 1: OutOfMemoryError: x\n\n{OOM}"
    verdict = judge_text(text)
    assert name_cause(verdict) == "device-memory-backward" and not verdict.candidates
    assert verdict.origin.rank == 1 and verdict.origin.actor == "trainer, rank 1"


def test_tags_and_times_of_many_tools_are_read():
    for text, rank, node, pid in [
        ("[rank3]: x", 3, None, None),
        ("(WorkerDict pid=118848, ip=10.1.2.3) x", None, "10.1.2.3", "118848"),
        ("\t", None, None, None),
        ("[1,5]<stderr>:x", 5, None, None),
        ("7: x", 7, None, None),
        ("node12: x", None, "node12", None),
        ("(EngineCore_DP0 pid=22) ERROR 10-25 13:08:43 [core.py:708] x", None, None, "22"),
    ]:
        origin, bare = split_tags(text)
        assert (origin.rank, origin.node, origin.pid) == (rank, node, pid) and bare in ("x", "\t"), text
    times = ["2026-03-10 15:07:20,500", "2026-03-10T15:07:20.5", "[E310 15:07:20.5000 x", "2026/03/10 15:07:20.5"]
    times += ["ERROR 03-10 15:07:20.5"]
    assert len({parse_time(text, 2026) for text in times}) == 1
    assert parse_time("Mar 10 15:07:20 node kernel: x", 2026) == parse_time("2026-03-10 15:07:20")
    assert parse_time("no time here") is None


def test_the_answer_for_programs_has_the_same_content():
    verdict = judge_text(OOM)
    answer = to_json(verdict, [])
    assert answer["cause"] == "device-memory-backward" and answer["evidence"][0]["place"] == "run.log:4"
    assert to_json(judge_text("step 1 loss 2\n"), [])["cause"] is None


def test_an_exception_that_was_caught_is_not_the_cause_of_a_later_one():
    caught = 'Traceback (most recent call last):\n  File "/x/site-packages/a.py", line 1, in f\n    import kernels\n'
    caught += "ModuleNotFoundError: No module named 'kernels'\n"
    work = "".join(f"shard {i} of 20\n" for i in range(20))
    assert name_cause(judge_text(caught + work + OOM)) == "device-memory-backward"
    assert name_cause(judge_text(caught + OOM)) == "module-missing"


def test_tracebacks_of_notebooks_and_of_rich_show_their_frames():
    notebook = (
        "OddError                                  Traceback (most recent call last)\nCell In[9], line 3\n"
        "----> 3 trainer.train()\n\nFile ~/x/site-packages/trainer.py:22, in Trainer.train(self)\n"
        "     21 if go:\n---> 22     return loop()\n\nOddError: odd\n"
    )
    rich = (
        "╭──────── Traceback (most recent call last) ────────╮\n│ /home/me/train.py:80 in main                      │\n"
        "│ ❱ 80 │   trainer.train()                          │\n╰───────────────────────────────────────────────────╯\n"
        "OddError: odd\n"
    )
    assert judge_text(notebook).evidence[1] == ("Cell In[9]:3", "here")
    assert judge_text(rich).evidence[1] == ("/home/me/train.py:80", "in main")
    assert "raised an exception (OddError: odd)" in write_report(judge_text(rich), [])


def test_an_assertion_without_a_message_is_shown_with_its_source():
    text = (
        'Traceback (most recent call last):\n  File "/x/site-packages/a.py", line 1, in f\n    assert lr is not None\n'
    )
    assert "AssertionError: assert lr is not None" in write_report(judge_text(text + "AssertionError\n"), [])


def test_a_log_that_only_waits_is_a_standstill():
    stamp = "2026-03-10 {:02d}:00:00,000 INFO {}\n"
    waits = stamp.format(1, "loading adapter") + "".join(stamp.format(2 + i, "waiting for step 3") for i in range(8))
    ended = stamp.format(12, "the run was ended by the operator after hours without progress")
    lives = "".join(stamp.format(2 + i, '"GET /health HTTP/1.1" 200 OK') for i in range(8))
    for text in (waits, waits + ended, stamp.format(1, "ready") + lives + ended):
        verdict = judge_text(text)
        assert name_cause(verdict) == "standstill" and verdict.cause and verdict.cause.line == 0
    assert name_cause(judge_text(stamp.format(1, "ready") + lives)) is None
    vain = "".join(
        f"2026-03-10 01:00:0{i},000 INFO Server is not up yet. Retrying in 2.0 seconds...\n" for i in range(4)
    )
    assert name_cause(judge_text("loading the model\n" + vain)) == "standstill"
    assert name_cause(judge_text(vain + "Server is up!\n")) is None
