"""A slow and lossy wire between two hosts: carries Ethernet frames between two new interfaces, `wire0` and `wire1`.

    wire.py MILLISECONDS LOST-PER-THOUSAND

The interfaces appear in this process's network namespace, and may be moved to another. Unlike `tc netem`, it needs no module of
the kernel but TUN. The lost frames come from a fixed seed. SIGUSR1 makes the wire a fast one that loses nothing.
"""

import asyncio
import fcntl
import os
import random
import signal
import struct
import sys

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000

delay, lost = float(sys.argv[1]) / 1000, float(sys.argv[2]) / 1000
chance = random.Random(7)


def interface(name):
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return end


def deliver(end, frame):
    try:
        os.write(end, frame)
    except OSError:
        # The interface is down, or its queue is full: the frame is lost.
        pass


def mend():
    global delay, lost
    delay = lost = 0.0


async def carry():
    ends = [interface("wire0"), interface("wire1")]
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, mend)

    def arrived(source, destination):
        try:
            frame = os.read(source, 65536)
        except OSError:
            return
        if chance.random() >= lost:
            loop.call_later(delay, deliver, destination, frame)

    loop.add_reader(ends[0], arrived, ends[0], ends[1])
    loop.add_reader(ends[1], arrived, ends[1], ends[0])
    print("ready", flush=True)
    await asyncio.Event().wait()


asyncio.run(carry())
