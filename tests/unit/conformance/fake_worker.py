"""Speaks a worker's language without torch; the name of a check says what happens to the process."""

import json
import os
import sys
import time
from multiprocessing.connection import Connection

pipe = Connection(int(sys.argv[1]))
settings = json.loads(sys.argv[2])


def send(**message):
    pipe.send_bytes(json.dumps(message).encode())


if settings["device"] == "broken":
    print("no such device: broken", file=sys.stderr)
    sys.exit(3)
send(idle=True)
while True:
    try:
        request = json.loads(pipe.recv_bytes())
    except EOFError:
        break
    if request["do"] == "list":
        send(listed=[["ops", "add", "int8", ["right", "wrong"]]], device_name="fake")
        send(idle=True)
        continue
    lost = False
    if request["name"] == "dies-before-it-starts":
        os.abort()
    for check in request["checks"]:
        case = "/".join([request["what"], request["name"], request["dtype"], check])
        send(started=check)
        if check == "abort":
            print("the kernel is broken", file=sys.stderr, flush=True)
            os.abort()
        if check == "exit":
            os._exit(7)
        if check == "hang":
            time.sleep(1000)
        time.sleep(0.05 if check == "slow" else 0)
        status = {"wrong": "wrong", "lost": "error"}.get(check, "pass")
        send(result={"case": case, "status": status, "message": f"by {os.getpid()}", "seconds": 0.0})
        if check == "lost":
            send(lost="the device is gone")
            lost = True
            break
    if lost:
        break
    send(idle=True)
