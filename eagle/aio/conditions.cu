// Guards of conditional graph nodes. A guard holds while *count != (baseline ? *baseline : 0).
//
// A loop has a cell [remaining, ran] (uint32) that its body kernels may read, and a word `replay` that counts the
// replays of its graph. To stop a loop from outside, the host copies an interval of replay numbers into `stops`
// on another stream: entry (replay % STOP_SLOTS) = {first, behind}. Replay numbers are never reused, so a stop that
// comes late hits nothing and no launch has to reset anything.

extern "C" __device__ __cudart_builtin__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);

typedef unsigned long long u64;
typedef unsigned int u32;

#ifndef STOP_SLOTS
#error "STOP_SLOTS is given on the compiler's command line"
#endif

__device__ __forceinline__ u32 holds(const u32* count, const u32* baseline) {
    u32 want = baseline ? *(const volatile u32*)baseline : 0u;
    return *(const volatile u32*)count != want;
}

__device__ __forceinline__ u32 stopped(const u64* stops, u64 replay) {
    const volatile u64* entry = stops + 2 * (replay % STOP_SLOTS);
    u64 first = entry[0], behind = entry[1];
    return first <= replay && replay < behind;
}

// IF: run the region when the guard holds.
extern "C" __global__ void eagle_if(u64 condition, const u32* count, const u32* baseline) {
    cudaGraphSetConditional(condition, holds(count, baseline));
}

// WHILE, before the first iteration: start the cell afresh and decide entry.
extern "C" __global__ void eagle_loop_head(u64 condition, const u32* count, const u32* baseline, u32* cell, u64* replay,
                                           const u64* stops, u32 max_iters) {
    u64 number = *replay + 1;
    *replay = number;
    cell[0] = max_iters;
    cell[1] = 0;
    cudaGraphSetConditional(condition, holds(count, baseline) && !stopped(stops, number));
}

// WHILE, at the end of each iteration: count it and decide whether another follows.
extern "C" __global__ void eagle_loop_tail(u64 condition, const u32* count, const u32* baseline, u32* cell,
                                           const u64* replay, const u64* stops) {
    u32 left = cell[0] - 1;
    cell[0] = left;
    cell[1] += 1;
    cudaGraphSetConditional(condition, left && holds(count, baseline) && !stopped(stops, *replay));
}
