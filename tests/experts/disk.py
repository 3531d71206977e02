"""Files of painted records, and a shared library that makes reads fail, for the tests of experts/."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.artifact.records import LayerRecords
from headrace.kernels.program import ExpertLayout, WeightSpans

BLOCK = 4096
GAP = 2 * BLOCK  # before the first layer of a file

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

/* preadv, and preadv2, which Python calls: fail with EIO for reads that touch byte SHIM_OFFSET, SHIM_TIMES times;
   never say that they read more than SHIM_MOST bytes, and are interrupted every second time then;
   fail with EINVAL for O_DIRECT with SHIM_NO_DIRECT 2, and so does open with 1;
   with SHIM_GATE, wait for that file to appear before reads that touch byte SHIM_OFFSET; log offsets to SHIM_LOG. */
static atomic_int failed, calls;
static long number(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text ? atol(text) : otherwise;
}
static ssize_t shim(int fd, const struct iovec* v, int n, off_t at) {
  static ssize_t (*real)(int, const struct iovec*, int, off_t);
  if (!real) real = dlsym(RTLD_NEXT, "preadv");
  const long offset = number("SHIM_OFFSET", -1), times = number("SHIM_TIMES", 0), most = number("SHIM_MOST", 0);
  long size = 0;
  for (int i = 0; i < n; ++i) size += v[i].iov_len;
  if (most && atomic_fetch_add(&calls, 1) % 2) { errno = EINTR; return -1; }
  const char *gate = getenv("SHIM_GATE"), *log = getenv("SHIM_LOG");
  if (log) {
    char line[32];
    const int file = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (write(file, line, snprintf(line, sizeof line, "%ld\n", (long)at)) < 0) abort();
    close(file);
  }
  if (number("SHIM_NO_DIRECT", 0) == 2 && fcntl(fd, F_GETFL) & O_DIRECT) { errno = EINVAL; return -1; }
  if (at <= offset && offset < at + size) {
    while (gate && access(gate, F_OK)) usleep(1000);
    if (atomic_fetch_add(&failed, 1) < times) {
      errno = EIO;
      return -1;
    }
  }
  if (most && size > most) {
    const ssize_t got = real(fd, v, n, at);
    return got > most ? most : got;
  }
  return real(fd, v, n, at);
}
static int shim_open(const char* path, int flags, int mode) {
  if (number("SHIM_NO_DIRECT", 0) == 1 && flags & O_DIRECT) { errno = EINVAL; return -1; }
  return openat(AT_FDCWD, path, flags, mode);
}
int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  return shim_open(path, flags, flags & O_CREAT ? va_arg(more, int) : 0);
}
int open64(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  return shim_open(path, flags, flags & O_CREAT ? va_arg(more, int) : 0);
}
ssize_t preadv(int fd, const struct iovec* v, int n, off_t at) { return shim(fd, v, n, at); }
ssize_t preadv64(int fd, const struct iovec* v, int n, off_t at) { return shim(fd, v, n, at); }
ssize_t preadv2(int fd, const struct iovec* v, int n, off_t at, int f) { (void)f; return shim(fd, v, n, at); }
ssize_t preadv64v2(int fd, const struct iovec* v, int n, off_t at, int f) { (void)f; return shim(fd, v, n, at); }
"""


def painted(layer: int, expert: int, nbytes: int) -> NDArray[np.uint8]:
    """The bytes of one record: a period of 251, begun at another place by every expert."""
    return ((np.arange(nbytes) + 37 * layer + 101 * expert) % 251).astype(np.uint8)


def layout(nbytes: int) -> ExpertLayout:
    """A layout of which only the size matters here."""
    nothing = WeightSpans({}, 0, 0, 4, 32)
    return ExpertLayout(nothing, nothing, nbytes)


def write(
    folder: Path, sizes: list[int], num_experts: int, name: str = "experts"
) -> list[LayerRecords]:
    """One file a pair of layers; layer i has records of sizes[i] bytes."""
    records = []
    for first in range(0, len(sizes), 2):
        path, at = folder / f"{name}-{first:05}.safetensors", GAP
        with path.open("wb") as file:
            file.write(bytes(GAP))
            for layer in range(first, min(first + 2, len(sizes))):
                size = sizes[layer]
                records.append(LayerRecords(layer, path, at, num_experts, layout(size)))
                for expert in range(num_experts):
                    file.write(painted(layer, expert, size).tobytes())
                at += num_experts * size
    return records


def compile_shim(folder: Path) -> Path | None:
    """The failing preadv as a library to preload; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library
