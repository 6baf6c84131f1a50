# --- baked by tiledsched: rms_norm_schedule ---
# tiledsched bake rms_norm --arch sm_90 --max-leaves 4
# Measured on NVIDIA H200 (sm_90), tileiras 13.5.37, burst, 2026-11-22 to 2026-11-24.
# 4 leaves, 4 schedules, 14 problems. Than with the table's choices, a problem takes 1.7% longer in the geometric
# mean, at worst 6.5%; 64% of these ratios are measured, the others estimated.
# All of these problems have dtype=bfloat16.
# Do not edit this: run the command again. With --check it says whether this is what the table says today.
# fmt: off
class _Schedule(dict):  # knobs are keys and attributes; where a search stood, this is its result, too
    __getattr__, mean_us = dict.__getitem__, float('nan')
    best, config = property(lambda self: self), property(lambda self: self.get('config', self))


_RMS_NORM = [_Schedule(zip(('HOLD', 'TILE_COLUMNS', 'loads', 'num_worker_warps', 'occupancy'), row),
    PERSISTENT=False, TILE_ROWS=1) for row in [(True,1024,'plain',8,0,), (True,16384,'plain',8,2,),
    (False,8192,'gather',8,2,), (True,512,'gather',4,0,)]]


def _rms_norm_number(residual, rows):
    return (1 if residual else 1) if rows <= 29308 else 2 if rows <= 65536 else 3


def rms_norm_schedule(*, columns, residual, rows, dtype=None):
    number = _rms_norm_number(residual, rows)
    if (number in [0] and not (columns <= 32 * 1024) or number in [1] and not (columns <= 32 * 16384) or number in
        [3] and not (columns <= 32 * 512) or number in [2] and not (columns <= 32 * 8192)):
        raise ValueError('no schedule that was baked runs this problem; tune it, and bake again')
    return _RMS_NORM[number]
# fmt: on
# --- end of what tiledsched baked ---
