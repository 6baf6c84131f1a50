# Build the wheel, install it into an environment of its own and use it from a folder that is not the checkout.
set -eu
: "${BIN:=.venv/bin}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$BIN/python" -m build --wheel --outdir "$work/dist" . > "$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
"$BIN/python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "$work"/dist/*.whl
cd "$work"
export HOME="$work/home" TILEDSCHED_DB="$work/tuning.db" TILEDSCHED_CACHE="$work/cache"
mkdir -p "$HOME"
PATH="$work/venv/bin:$PATH"
python -c "import tiledsched; assert not tiledsched.__file__.startswith('$OLDPWD'), tiledsched.__file__"
tiledsched --version
tiledsched doctor
cat > small.toml <<'TOML'
extends = "attention/sm_121.toml"
[knobs.tile_m]
choices = [64]
[knobs.tile_n]
choices = [64]
[knobs.occupancy]
choices = [2]
[knobs.opt_level]
choices = [3]
[knobs.num_worker_warps]
choices = [4]
[knobs.latency_k]
choices = [0]
[knobs.latency_v]
choices = [0]
TOML
tiledsched tune --arch sm_121 --space small.toml -p B=16,H=32,S=1024,D=64
tiledsched show attention --arch sm_121 --json > show.json
python -c "import json; rows = json.load(open('show.json'))['entries']; assert [r['provenance'] for r in rows if r['batch'] == 16 and r['S'] == 1024], rows"
tiledsched report --arch sm_121 --out report > /dev/null
head -1 report/report.md
tiledsched db check
# With a driver and without what measures, a tune stops with the line that brings it; with that (here: made up), it measures.
mkdir driver
printf '#!/bin/sh\n' > driver/nvidia-smi
chmod +x driver/nvidia-smi
PATH="$work/driver:$PATH"
problem="softmax -p rows=64,columns=1024 --candidates one.json"
echo '[{"num_worker_warps": 8}]' > one.json
! tiledsched tune --arch sm_121 $problem 2> said.txt
grep -F "run: pip install 'tiledsched[gpu] @ file://" said.txt
export PYTHONPATH="$OLDPWD/tests/fake_gb10"
tiledsched doctor | grep "measuring:  yes (on NVIDIA GB10 (sm_121))"
tiledsched tune $problem | grep "us measured, "
echo "the wheel works outside the checkout"
