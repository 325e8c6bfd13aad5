"""Programs that a grader must judge rightly, whatever they try: data, never run outside a sandbox.

Each is to add two numbers. `stdin` programs read them from a line; the others define `add`. What a
program might steal or reach stands in it as SECRET_FILE, FOLDER, PORT and OWNER; those of `STEALS`
print it, and would be right if they had it.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent

SECRET = "the secret"


@dataclass(frozen=True)
class Case:
    """A program, its mode and the verdicts that are right."""

    name: str
    mode: str
    verdicts: tuple[str, ...]
    source: str


def _cases(mode: str, verdict: str, **sources: str) -> list[Case]:
    verdicts = tuple(verdict.split("|"))
    return [
        Case(f"{mode} {name.replace('_', ' ')}", mode, verdicts, dedent(source).strip() + "\n")
        for name, source in sources.items()
    ]


HONEST = [
    *_cases(
        "stdin", "correct",
        plain="a, b = map(int, input().split())\nprint(a + b)",
        exit_after_answer="import sys\nprint(sum(map(int, input().split())))\nsys.exit(0)",
        bytes_in_and_out="import os\na, b = os.read(0, 100).split()\nos.write(1, b'%d\\n' % (int(a) + int(b)))",
        whole_stdin="import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        stdin_buffer="import sys\nsys.stdout.buffer.write(str(sum(map(int, sys.stdin.buffer.read().split()))).encode())",
        much_on_stderr="import sys\nsys.stderr.write('x' * 20_000_000)\nprint(sum(map(int, input().split())))",
        big_thread_stack="""
            import sys, threading
            def main(): print(sum(map(int, input().split())))
            sys.setrecursionlimit(10**6); threading.stack_size(128 * 2**20)
            t = threading.Thread(target=main); t.start(); t.join()""",
        thread_not_joined="""
            import threading, time
            def main(): time.sleep(0.02); print(sum(map(int, input().split())))
            threading.Thread(target=main).start()""",
        numpy="import numpy\nprint(int(numpy.array(input().split(), dtype=int).sum()))",
        asyncio="import asyncio\nasync def main(): await asyncio.sleep(0.001); print(sum(map(int, input().split())))\nasyncio.run(main())",
        deep_recursion="""
            import sys
            sys.setrecursionlimit(20000)
            def down(n): return 0 if n == 0 else 1 + down(n - 1)
            print(sum(map(int, input().split())) + down(5000) - 5000)""",
        at_exit="import atexit\natexit.register(lambda: print(sum(map(int, input().split()))))",
        main_guard="if __name__ == '__main__':\n    print(sum(map(int, input().split())))",
        own_temporary_memory="import io, tempfile\nprint(sum(map(int, input().split())))",
        number_as_float="print(float(sum(map(int, input().split()))))",
        trailing_space="print(sum(map(int, input().split())), end='  \\n\\n')",
        alarm_of_its_own="import signal\nsignal.alarm(60)\nprint(sum(map(int, input().split())))",
        dataclass_and_typing="""
            from __future__ import annotations
            from dataclasses import dataclass
            @dataclass
            class Pair: a: int; b: int
            p = Pair(*map(int, input().split())); print(p.a + p.b)""",
        pipe_of_its_own="import os\nr, w = os.pipe(); os.write(w, input().encode()); print(sum(map(int, os.read(r, 99).split())))",
        process_pool_of_threads="from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as p: print(sum(p.map(int, input().split())))",
        random_and_decimal="import random, decimal\nrandom.seed(1)\nprint(sum(map(decimal.Decimal, input().split())))",
    ),
    *_cases(
        "call", "correct",
        plain="def add(a, b): return a + b",
        class_solution="class Solution:\n    def add(self, a, b): return a + b",
        prints_too="def add(a, b):\n    print('adding', a, b)\n    return a + b",
        int_subclass="class Number(int): pass\ndef add(a, b): return Number(a + b)",
        numpy_integer="import numpy\ndef add(a, b): return numpy.int64(a) + b",
        whole_float="def add(a, b): return float(a + b)",
        exit_in_main_guard="import sys\ndef add(a, b): return a + b\nif __name__ == 'nobody': sys.exit(1)",
    ),
    *_cases(
        "assert", "correct",
        plain="def add(a, b): return a + b",
        prints_a_lot="def add(a, b):\n    print('x' * 1000)\n    return a + b",
        with_helper="def plus(a, b): return a + b\ndef add(a, b): return plus(a, b)",
        cached="import functools\n@functools.cache\ndef add(a, b): return a + b",
    ),
    *_cases(
        "unittest", "correct",
        plain="def add(a, b):\n    if a is None: raise ValueError('no number')\n    return a + b",
    ),
]  # fmt: skip
"""Programs that no grader may fail."""

FORGERIES = [
    *_cases(
        "stdin", "incorrect",
        wrong="print(0)",
        nothing="",
        exit_at_once="import sys\nsys.exit(0)",
        hard_exit="import os\nos._exit(0)",
        quit_in_thread="import threading, os\nthreading.Thread(target=lambda: os._exit(0)).start()",
        passed_message="print('ALL TESTS PASSED')",
        verdict_message="print('{\"verdict\": \"right\", \"score\": 1.0}')",
        all_answers="for i in range(1000): print(i)",
        all_answers_in_a_line="print(*range(1000))",
        full_width_digits="print(''.join(chr(0xFF10 + int(c)) for c in str(sum(map(int, input().split())))))",
        arabic_digits="print(''.join(chr(0x660 + int(c)) for c in str(sum(map(int, input().split())))))",
        invalid_utf8="import sys\nsys.stdout.buffer.write(b'\\xff\\xfe3')",
        nul_bytes="print('3\\0')",
        nan="print('nan')",
        infinite="print('inf')",
        answer_on_stderr="import sys\nprint(sum(map(int, input().split())), file=sys.stderr)",
        patched_builtins="import builtins\nbuiltins.all = lambda *a: True\nbuiltins.len = lambda x: 0\nprint(0)",
        every_descriptor="""
            import os
            for fd in range(2, 300):
                try: os.write(fd, b'{"exit_code": 0, "cpu_s": 0, "verdict": "correct"}')
                except OSError: pass""",
        fake_confined="import os\nfor fd in range(3, 300):\n    try: os.write(fd, b'confined')\n    except OSError: pass\nprint(1)",
        frames="""
            import sys
            f = sys._getframe()
            while f:
                for v in list(f.f_locals.values()):
                    if isinstance(v, dict) and 'expected' in v: print(v['expected'])
                f = f.f_back
            print('not found')""",
        garbage_collector="""
            import gc
            found = [o for o in gc.get_objects() if isinstance(o, (list, tuple)) and '42' in map(str, o[:5])]
            print(len(found) and 'found' or 'none')""",
        stdin_again="import os\nos.lseek(0, 0, 0)\ntry: os.write(0, b'0 3')\nexcept OSError: pass\nprint('3' if input() == '0 3' else 'sealed')",
    ),
    *_cases(
        "call", "incorrect",
        wrong="def add(a, b): return 0",
        none="def add(a, b): pass",
        equal_to_all="class Yes:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n    __hash__ = None\ndef add(a, b): return Yes()",
        equal_int="class Yes(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\ndef add(a, b): return Yes(0)",
        equal_string="class Yes(str):\n    def __eq__(self, o): return True\n    __hash__ = str.__hash__\ndef add(a, b): return Yes('x')",
        text="def add(a, b): return str(a + b)",
        boolean="def add(a, b): return True",
        pickle_bomb="import os\nclass Bomb:\n    def __reduce__(self): return os.system, ('touch FOLDER/escaped',)\ndef add(a, b): return Bomb()",
        nan="def add(a, b): return float('nan')",
        infinite="def add(a, b): return float('inf')",
        function="def add(a, b): return lambda: a + b",
        patched_json="import json\njson.dumps = lambda *a, **k: '{\"value\": 0}'\ndef add(a, b): return 0",
        colliding_set="def add(a, b): return {i * (2**61 - 1) for i in range(300)}",
        tagged_dictionary="def add(a, b): return {'i': '0x3'}",
        answers_ahead="""
            import os
            os.write(5, b'{"names": []}\\n' + b'{"value": 1}\\n' * 9)
            def add(a, b): return 0""",
        forged_values="""
            import os
            os.write(5, b'{"names": []}\\n{"value": {"q": 1}}\\n{"value": NaN}\\n')
            def add(a, b): return 0""",
        nested_line="""
            import os
            os.write(5, b'{}\\n' + b'[' * 100000 + b'\\n')
            def add(a, b): return 0""",
        long_number="import os\nos.write(5, b'{}\\n{\"value\": ' + b'9' * 10000 + b'}\\n')\ndef add(a, b): return 0",
    ),
    *_cases(
        "assert", "incorrect",
        wrong="def add(a, b): return 0",
        equal_to_all="class Yes:\n    def __eq__(self, o): return True\ndef add(a, b): return Yes()",
        number_like="class Yes(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\ndef add(a, b): return Yes(0)",
        own_abs="def abs(x): return 0\ndef isinstance(*a): return True\ndef add(a, b): return 0",
        says_yes="class Yes:\n    def startswith(self, x): return True\n    def add(self, x): return 3\ndef add(a, b): return Yes()",
        assertion_error="def add(a, b): raise AssertionError('no')",
        patched_main="import sys\nsys.modules['__main__'].check = lambda c: None\ndef add(a, b): return 0",
        no_assertions="import builtins\nbuiltins.AssertionError = KeyError\ndef add(a, b): return 0",
        verdict_on_all_descriptors="""
            import os
            for fd in (1, 2, 6, 7, 8, 9):
                try: os.write(fd, b'["nonce", "correct", ""]\\n')
                except OSError: pass
            def add(a, b): return 0""",
    ),
    *_cases(
        "unittest", "incorrect",
        wrong="def add(a, b):\n    if a is None: raise ValueError('no number')\n    return 0",
        raises_nothing="def add(a, b): return (a or 0) + b",
        patched_unittest="import unittest\nunittest.TestCase.assertEqual = lambda *a: None\nunittest.TestCase.assertRaises = lambda *a: None\ndef add(a, b): return 0",
    ),
    *_cases(
        "unittest", "runtime_error",
        skip_test="import unittest\ndef add(a, b): raise unittest.SkipTest('no need')",
    ),
    *_cases(
        "call", "runtime_error",
        exit_at_once="import sys\nsys.exit(0)",
        exit_in_function="import sys\ndef add(a, b): sys.exit(0)",
        hard_exit="import os\ndef add(a, b): os._exit(0)",
        keyboard_interrupt="def add(a, b): raise KeyboardInterrupt",
        base_exception="class Up(BaseException): pass\ndef add(a, b): raise Up",
        no_function="x = 1",
        cyclic="def add(a, b):\n    x = []\n    x.append(x)\n    return x",
        deep="def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
        interpreter_recursion="def add(a, b): return add(b, a)",
        closed_answers="import os\nos.close(5)\ndef add(a, b): return 0",
        raising_repr="class Up(Exception):\n    def __str__(self): raise SystemExit(0)\ndef add(a, b): raise Up",
    ),
    *_cases(
        "assert", "runtime_error",
        exit_at_once="import sys\nsys.exit(0)",
        hard_exit="import os\ndef add(a, b): os._exit(0)",
        system_exit="def add(a, b): raise SystemExit(0)",
        stop_iteration="def add(a, b): raise StopIteration",
        keyboard_interrupt="def add(a, b): raise KeyboardInterrupt",
        no_function="x = 1",
        noise_for_the_tester="""
            import os
            os.write(5, b'{"names": ["add", "check", "abs", "all"]}\\n' + b'{"value": {"t": 7}}\\n' * 20)
            def add(a, b): return 0""",
        garbage_for_the_tester="import os\nos.write(5, b'\\xff' * 1000 + b'\\n')\ndef add(a, b): return 0",
        endless_line_for_the_tester="import os\nwhile True: os.write(5, b'[' * 65536)",
    ),
]  # fmt: skip
"""Programs that want to pass without an answer."""

EXHAUSTING = [
    *_cases(
        "stdin", "timeout",
        loop="while True: pass",
        no_alarm="import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
        catches_all="while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        sleep="import time\ntime.sleep(1000)",
        waits_for_input="import threading\nthreading.Event().wait()",
        regular_expression="import re\nre.match(r'(a+)+$', 'a' * 40 + 'b')",
        power="x = 10**(10**9)",
        loops_in_threads="import threading\nfor _ in range(4): threading.Thread(target=lambda: exec('while True: pass')).start()",
        loop_at_exit="import atexit\natexit.register(lambda: exec('while True: pass'))",
        forever_in_destructor="class A:\n    def __del__(self):\n        while True: pass\na = A()\ndel a",
        thread_never_joined="import threading, time\nprint(sum(map(int, input().split())))\nthreading.Thread(target=time.sleep, args=(1000,)).start()",
        own_pipe="import os\nr, w = os.pipe()\nos.read(r, 1)",
    ),
    *_cases("call", "incorrect|runtime_error", patched_builtins="import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.type = lambda o: int\nclass Yes: pass\ndef add(a, b): return Yes()"),
    *_cases("call", "incorrect", endless_generator="def add(a, b):\n    while True: yield a"),
    *_cases("stdin", "timeout|output_limit", endless_lines="while True: print('3')"),
    *_cases("stdin", "incorrect|runtime_error", poisoned_module="open('/tmp/json.py', 'w').write('print(3)') if __import__('os').access('/tmp', 2) else 0\nprint('poisoned')"),
    *_cases("stdin", "timeout|incorrect", stops_itself="import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"),
    *_cases("stdin", "timeout|parse_error", compile_time="x = " + "-" * 20000 + "1"),
    *_cases(
        "call", "timeout",
        loop="def add(a, b):\n    while True: pass",
        loop_in_repr="class A(Exception):\n    def __str__(self):\n        while True: pass\ndef add(a, b): raise A",
    ),
    *_cases(
        "assert", "timeout",
        loop="def add(a, b):\n    while True: pass",
        never_ready="while True: pass",
        sleeps="import time\ndef add(a, b): time.sleep(1000)",
    ),
    *_cases("stdin", "memory_limit",
        large="x = bytearray(1_500_000_000)",
        growing="x = []\nwhile True: x.append(bytes(10_000_000))",
        large_text="x = 'x' * (3 * 10**9)",
        large_list="x = [0] * (10**10)",
    ),
    *_cases("call", "memory_limit",
        large="def add(a, b): return bytearray(1_500_000_000)",
        large_repr="def add(a, b): return 'x' * 10**9",
    ),
    *_cases("assert", "memory_limit", large="def add(a, b): return bytearray(1_500_000_000)"),
    *_cases("stdin", "output_limit",
        much="for _ in range(150): print('x' * 1_000_000)",
        much_at_once="import os\nx = b'x' * 65536\nwhile True: os.write(1, x)",
    ),
    *_cases("call", "output_limit",
        long_answer="def add(a, b): return 'x' * 6_000_000",
        much_on_stdout="def add(a, b):\n    while True: print('x' * 10000)",
        much_to_the_grader="import os\nwhile True: os.write(5, b'{}\\n' * 10000)",
    ),
    *_cases("stdin", "runtime_error",
        many_threads="""
            import threading, time
            threading.stack_size(65536)
            for _ in range(3000): threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
            raise SystemExit(3)""",
        many_descriptors="import os\nwhile True: os.pipe()",
        large_file="f = open('/tmp/x', 'wb')\nfor _ in range(64): f.write(bytes(2**20)); f.flush()",
        many_files="for i in range(100000): open(f'/tmp/{i}', 'w').close()",
        recursion="def f(): return f()\nf()",
    ),
]  # fmt: skip
"""Programs that use too much."""

BREAKING = [
    *_cases("stdin", "runtime_error",
        raises="raise ValueError('no')",
        exit_code="import sys\nprint(sum(map(int, input().split())))\nsys.exit(3)",
        exit_message="import sys\nprint(sum(map(int, input().split())))\nsys.exit('done')",
        answer_then_error="print(sum(map(int, input().split())))\n1 / 0",
        segmentation_fault="import ctypes\nctypes.string_at(0)",
        aborts="import os\nos.abort()",
        fake_infrastructure="import os\nos.write(2, b'OSError: cannot confine')\nos._exit(1)",
        kills_itself="import os, signal\nsignal.raise_signal(signal.SIGSEGV)\nos._exit(9)",
        deep_stack="import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1) + [f].__len__()\nclass A:\n    def __getattr__(self, n): return getattr(self, n)\nA().x",
        fork="import os\nos.fork()",
        fork_bomb="import os\nwhile True: os.fork()",
        fork_by_libc="import ctypes\nif ctypes.CDLL(None).fork() < 0: raise SystemExit(2)\nprint(3)",
        spawn="import subprocess\nprint(subprocess.check_output(['echo', '3']))",
        multiprocessing="import multiprocessing\nmultiprocessing.Process(target=print).start()",
        daemon="import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True: os.write(1, b'x')",
    ),
    *_cases("stdin", "incorrect", system_by_libc="import ctypes\nctypes.CDLL(None).system(b'echo 3; touch FOLDER/escaped')",
        system="import os\nos.system('touch FOLDER/escaped')"),
    *_cases("stdin", "parse_error",
        syntax="def f(:",
        nul="print(3)\0",
        nested_parentheses="(" * 5000 + ")" * 5000,
        bad_encoding="# -*- coding: nonsense -*-\nprint(3)",
        prose="The answer is 3, since 1 and 2 make 3.",
        indentation="if True:\nprint(3)",
    ),
    *_cases("call", "parse_error", syntax="def add(a, b) return a + b"),
    *_cases("assert", "parse_error", syntax="def add(a, b) return a + b"),
]  # fmt: skip
"""Programs that end in an error."""

STEALS = [
    *_cases("steal", "runtime_error",
        file="print(open('SECRET_FILE').read())",
        passwords="open('/etc/passwd')\nprint('SECRET')",
        shadow="open('/etc/shadow')\nprint('SECRET')",
        home="import os\nos.listdir(os.path.expanduser('~root'))\nprint('SECRET')",
        ssh_key="import os\nopen(os.path.expanduser('~/.ssh/id_rsa'))\nprint('SECRET')",
        environment_of_owner="print(open('/proc/OWNER/environ').read())\nprint('SECRET')",
        environment_of_first="print(open('/proc/1/environ').read())\nprint('SECRET')",
        own_memory="open('/proc/self/mem', 'rb')\nprint('SECRET')",
        processes="import os\nos.listdir('/proc')\nprint('SECRET')",
        by_symbolic_link="import os\nos.symlink('SECRET_FILE', '/tmp/x')\nprint(open('/tmp/x').read())",
        by_hard_link="import os\nos.link('SECRET_FILE', '/tmp/x')\nprint(open('/tmp/x').read())",
        by_parent_folders="print(open('/tmp/' + '../' * 30 + 'SECRET_FILE').read())",
        write="open('FOLDER/escaped', 'w')\nprint('SECRET')",
        overwrite="open('SECRET_FILE', 'w')\nprint('SECRET')",
        truncate="import os\nos.truncate('SECRET_FILE', 0)\nprint('SECRET')",
        delete="import os\nos.unlink('SECRET_FILE')\nprint('SECRET')",
        rename="import os\nos.rename('SECRET_FILE', 'FOLDER/escaped')\nprint('SECRET')",
        make_folder="import os\nos.mkdir('FOLDER/escaped')\nprint('SECRET')",
        change_mode="import os\nos.chmod('SECRET_FILE', 0)\nprint('SECRET')",
        change_owner="import os\nos.chown('SECRET_FILE', 1, 1)\nprint('SECRET')",
        change_time="import os\nos.utime('SECRET_FILE', (0, 0))\nprint('SECRET')",
        change_library="import os\nopen(os.__file__, 'a')\nprint('SECRET')",
        device="import os\nos.mknod('/tmp/disk', 0o60600, os.makedev(254, 0))\nopen('/tmp/disk')\nprint('SECRET')",
        tcp="import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)\nprint('SECRET')",
        tcp6="import socket\nsocket.socket(socket.AF_INET6)\nprint('SECRET')",
        udp="import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))\nprint('SECRET')",
        raw_packets="import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)\nprint('SECRET')",
        netlink="import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)\nprint('SECRET')",
        abstract_socket="import socket\nsocket.socket(socket.AF_UNIX).connect('\\0SOCKET')\nprint('SECRET')",
        listen="import socket\nsocket.create_server(('127.0.0.1', 0))\nprint('SECRET')",
        pair_sends_elsewhere="import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\na.sendto(b'x', '\\0SOCKET')\nprint('SECRET')",
        resolve="import socket\nsocket.gethostbyname('example.com')\nprint('SECRET')",
        kill_owner="import os\nos.kill(OWNER, 9)\nprint('SECRET')",
        kill_parent="import os\nif os.getppid() == 0: raise OSError\nos.kill(os.getppid(), 9)\nprint('SECRET')",
        kill_all="import os\nos.kill(-1, 9)\nprint('SECRET')",
        kill_group="import os\nos.killpg(0, 9)\nprint('SECRET')",
        signal_by_owner="import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, OWNER)\nprint('SECRET')",
        raise_limits="import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nprint('SECRET')",
        limits_of_owner="import resource\nresource.prlimit(OWNER, resource.RLIMIT_NOFILE, (9, 9))\nprint('SECRET')",
        become_root="import os\nos.setuid(0)\nprint('SECRET')",
        change_root="import os\nos.chroot('/tmp')\nprint('SECRET')",
        priority="import os\nos.setpriority(os.PRIO_PROCESS, 0, 5)\nprint('SECRET')",
        affinity="import os\nos.sched_setaffinity(0, {0})\nprint('SECRET')",
        execute="import os\nos.execv('/usr/lib/os-release', ['x'])\nprint('SECRET')",
        shell="import os\nos.execv('/bin/sh', ['sh', '-c', 'echo SECRET'])",
        file_in_memory="import os\nfd = os.memfd_create('x')\nprint('SECRET')",
        **{
            name: "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
                  f"if libc.{call} < 0: raise OSError(ctypes.get_errno())\nprint('SECRET')"
            for name, call in {
                "trace": "ptrace(0, 0, 0, 0)",
                "trace_owner": "ptrace(16, OWNER, 0, 0)",
                "user_namespace": "unshare(0x10000000)",
                "mount_namespace": "unshare(0x20000)",
                "mount": "mount(b'none', b'/tmp', b'tmpfs', 0, 0)",
                "unmount": "umount2(b'/tmp', 2)",
                "io_uring": "syscall(425, 1, ctypes.create_string_buffer(120))",
                "bpf": "syscall(321, 0, ctypes.create_string_buffer(120), 120)",
                "keyring": "syscall(250, 0, -3, 1)",
                "performance_counters": "syscall(298, ctypes.create_string_buffer(120), 0, -1, -1, 0)",
                "read_owner": "syscall(310, OWNER, 0, 0, 0, 0, 0)",
                "descriptor_of_owner": "syscall(434, OWNER, 0)",
                "new_filter": "prctl(22, 1, 0)",
                "no_death_with_parent": "prctl(1, 0, 0, 0, 0)",
                "open_by_handle": "syscall(304, -100, ctypes.create_string_buffer(120), 0)",
                "fault_handler": "syscall(323, 1)",
                "clone3": "syscall(435, ctypes.create_string_buffer(88), 88)",
                "vfork": "syscall(58)",
                "clone_in_namespace": "syscall(56, 0x10000011, 0, 0, 0, 0)",
                "clone_process": "syscall(56, 17, 0, 0, 0, 0)",
                "x32_call": "syscall(0x40000039)",
                "shared_memory": "shmget(1, 4096, 0o1600)",
                "message_queue": "msgget(1, 0o1600)",
                "host_name": "sethostname(b'x', 1)",
                "clock": "clock_settime(0, ctypes.create_string_buffer(16))",
                "module": "syscall(175, 0, 0, b'')",
                "reboot": "syscall(169, 1, 2, 3, 0)",
                "swap": "swapoff(b'/swap')",
                "log": "klogctl(3, 0, 0)",
                "attributes": "setxattr(b'SECRET_FILE', b'user.x', b'1', 1, 0)",
            }.items()
        },
    ),
    *_cases("steal", "incorrect",
        environment="import os\nprint(dict(os.environ))",
        descriptors="""
            import os
            for fd in range(3, 300):
                try: print(os.read(fd, 10000).replace(b'# SECRET', b''))
                except OSError: pass""",
        libc_environment="import ctypes\nctypes.CDLL(None).getenv.restype = ctypes.c_char_p\nprint(ctypes.CDLL(None).getenv(b'SANDBOX_SECRET'))",
        arguments="import sys\nprint(sys.argv, sys.orig_argv)",
    ),
]  # fmt: skip
"""Programs that reach for what is not theirs; those that get there print what is right."""

CORPUS = [*HONEST, *FORGERIES, *EXHAUSTING, *BREAKING, *STEALS]
