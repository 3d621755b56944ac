"""The learner's checkpoints: slices of logical tensors in safetensors files, JSON beside them, nothing unpickled.

`boxes` says which part of which logical tensor a rank holds, `rank_state` what a model and its optimizer consist of,
`on_disk` and `index` how that lies on disk, `writer` how all ranks write it in the background, `reader` how one is
verified and read under any layout.
"""
