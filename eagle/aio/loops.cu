// Bookkeeping of device loops: the start count, the copy of the counters to the host, a tick, and the pacing of an
// automatic kernel in a WHILE node.

typedef unsigned long long u64;
typedef unsigned int u32;

// Samples of `mask` that are set, added to *count, which must be 0. One thread takes 16 bytes.
extern "C" __global__ void eagle_count_mask(const unsigned char* mask, u32* count, u64 n) {
    u64 at = (blockIdx.x * (u64)blockDim.x + threadIdx.x) * 16;
    u32 mine = 0;
    for (u64 i = at; i < at + 16 && i < n; ++i) mine += mask[i] != 0;
    for (int lane = 16; lane; lane >>= 1) mine += __shfl_down_sync(0xffffffffu, mine, lane);
    if ((threadIdx.x & 31) == 0 && mine) atomicAdd(count, mine);
}

// The end of a replay, one block: every counter goes to pinned memory, to one of two places in turn, since the next
// replay may have ended before the host has read them, and is cleared for the next replay (the first, the finished
// count, stays readable in *shown); then the host's word is raised, behind a fence, so that a host that sees it sees the
// counters too.
extern "C" __global__ void eagle_report(u32* cells, u32 words, u32* host, u32* replays, volatile u32* signal,
                                        u32* shown) {
    u32 count = *replays + 1;
    u32* place = host + (count & 1u) * words;
    if (threadIdx.x == 0) *shown = cells[0];
    for (u32 i = threadIdx.x; i < words; i += blockDim.x) {
        place[i] = cells[i];
        cells[i] = 0;
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        *replays = count;
        *signal = count;
    }
}

extern "C" __global__ void eagle_copy(const u32* from, u32 words, u32* to) {
    for (u32 i = threadIdx.x; i < words; i += blockDim.x) to[i] = from[i];
}

extern "C" __global__ void eagle_tick(u32* counter) { *counter += 1u; }

// The policy cells of an automatic loop, u64 each.
enum Cell { K, FINISHED_AT_LAUNCH, STEPS_DONE, MAX_STEPS, GO };

__device__ __forceinline__ u64 next_launch(const u64* policy, u64 k) {
    u64 left = policy[MAX_STEPS] - policy[STEPS_DONE];
    return k < left ? k : left;
}

// Before the loop: start afresh with a launch of `first` steps.
extern "C" __global__ void eagle_pace_begin(u64* policy, u32* go, long long* fused_steps, const u32* finished, u32 n,
                                            u64 max_steps, u64 first) {
    policy[MAX_STEPS] = max_steps;
    policy[STEPS_DONE] = 0;
    policy[K] = next_launch(policy, first);
    policy[FINISHED_AT_LAUNCH] = *finished;
    *fused_steps = (long long)policy[K];
    *go = *finished != n;
    policy[GO] = *go;
}

// After a launch: count it by its steps, and set the next one, twice as long up to `most`.
extern "C" __global__ void eagle_pace_next(u64* policy, u32* go, long long* fused_steps, const u32* finished, u32 n,
                                           u64 most, u32* launches_by_k) {
    u64 k = policy[K];
    launches_by_k[k] += 1u;
    policy[STEPS_DONE] += k;
    policy[FINISHED_AT_LAUNCH] = *finished;
    *go = *finished != n && policy[STEPS_DONE] < policy[MAX_STEPS];
    policy[GO] = *go;
    if (!*go) return;
    policy[K] = next_launch(policy, k * 2 < most ? k * 2 : most);
    *fused_steps = (long long)policy[K];
}
