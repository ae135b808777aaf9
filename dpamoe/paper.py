"""What the paper reports (DPA-MoE, arXiv 2610.21378), to stand beside what `dpamoe reproduce` measures."""

MODELS = "Qwen3-30B-A3B, DeepSeekMoE-16B-Chat, OLMoE-1B-7B-0125 and Qwen1.5-MoE-A2.7B"
FRONTIER = (
    "KL up to 4.5 times lower than Uniform-k at k̄ = 4 (DeepSeekMoE), 26 to 69 % lower on OLMoE and Qwen1.5-MoE; 2 to 4 GB less "
    "at equal fidelity; equal at k̄ = 2 and 8"
)
TASKS = (
    "mean of ARC-C, ARC-E, WinoGrande and PIQA from Uniform-k to DPA: OLMoE at k̄ = 3 60.60 to 62.40, Qwen1.5-MoE at k̄ = 4 "
    "62.04 to 63.45; at k̄ = 6 on OLMoE Uniform-k is ahead by 0.31"
)
STATIC = "Q2_K, Q5_K_M and Q8_0 at their own size, as points beside the frontier"
SPEED = "DPA against Uniform-k at equal k̄: tokens per second lower by 4 to 8 %, time to the first token longer by 30 to 50 %"
SIGNALS = "gate-only has most of the gain, full DPA is 4.6 to 5.4 % below gate-only, residual-only gains little"
CROSS_TERMS = (
    "cross terms at most 27 % of the true error for k ≥ 3 and 59.8 % at k = 2; Spearman above 0.999, Pearson above 0.95"
)
STORAGE = "35 sets of scales for separate precisions against 8 shared ones: 37.5 % more per expert"
TOP_P = "p = 0.25: 4.0 active experts on average, accuracy 0.37 points higher on average"
