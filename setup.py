"""List the compiled modules: every .pyx file under shardmq/ is one.

All else about the package is in pyproject.toml. A change to any .pxd or .h file compiles all
modules again.
"""

from glob import glob

from setuptools import Extension, setup

SHARED = sorted(glob("shardmq/**/*.pxd", recursive=True) + glob("shardmq/**/*.h", recursive=True))

setup(
    ext_modules=[
        Extension(
            source.removesuffix(".pyx").replace("/", "."),
            [source],
            depends=SHARED,
            include_dirs=["shardmq/shardd/wire"],  # of headers that its declarations include
            extra_compile_args=["-O3"],
            libraries=["m"],
        )
        for source in sorted(glob("shardmq/**/*.pyx", recursive=True))
    ]
)
