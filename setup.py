"""List the compiled modules: every .pyx file under shardmq/ is one.

All else about the package is in pyproject.toml. A module includes its .pxi files. A change to one
of them compiles this module again, and a change to any .pxd or .h file compiles all modules. Each
core compiles modules, and CFLAGS in the environment say what debuggers get.
"""

import os
import re
from glob import glob
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

SHARED = sorted(glob("shardmq/**/*.pxd", recursive=True) + glob("shardmq/**/*.h", recursive=True))

# Debian's Python compiles with -g, which takes a fifth of the time and half of the bytes.
FLAGS = ["-O3"] if "CFLAGS" in os.environ else ["-O3", "-g0"]

INCLUDE = re.compile(r'^include "(.+)"$', re.MULTILINE)


def parts(source: str) -> list[str]:
    """Return the .pxi files that a compiled module includes; they lie beside it."""
    path = Path(source)
    return [str(path.with_name(name)) for name in INCLUDE.findall(path.read_text())]


EXTENSIONS = [
    Extension(
        source.removesuffix(".pyx").replace("/", "."),
        [source],
        depends=SHARED + parts(source),
        include_dirs=["shardmq/shardd/wire"],  # of headers that its declarations include
        extra_compile_args=FLAGS,
        libraries=["m"],
    )
    for source in sorted(glob("shardmq/**/*.pyx", recursive=True))
]

setup(
    ext_modules=cythonize(EXTENSIONS, language_level=3),
    options={"build_ext": {"parallel": len(os.sched_getaffinity(0))}},
)
