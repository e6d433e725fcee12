// A libnccl.so.2 over shared memory and simulated CUDA devices; control.h says how it behaves.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/nccl/library.hpp"
#include "mock_nccl/control.h"
#include "simulated_cuda/control.h"
#include "tensor/half.hpp"

#define EXPORTED __attribute__((visibility("default")))

using tsr::nccl::Config;
using tsr::nccl::in_progress;
using tsr::nccl::Result;
using tsr::nccl::success;
using tsr::nccl::UniqueId;

namespace {

constexpr Result invalid_argument = 4;
constexpr Result invalid_usage = 5;
constexpr Result system_error = 2;
constexpr int illegal_address = 700;
constexpr size_t chunk_size = 64 << 10;
constexpr int most_ranks = 16;

// One rank's turn in the shared memory of a communicator.
struct Slot {
    alignas(64) char data[chunk_size];
};
struct Mailbox {
    alignas(64) std::atomic<uint32_t> full;
    uint32_t size;
    char data[chunk_size / 4];
};
struct Choice {
    int color;
    int key;
};
struct Shared {
    std::atomic<uint32_t> joined;
    alignas(64) std::atomic<uint32_t> arrived;
    alignas(64) std::atomic<uint32_t> generation;
    std::atomic<uint64_t> clocks[most_ranks];  // of the ranks' streams
    Choice choices[most_ranks];                // in a split
    Slot slots[most_ranks];
    Mailbox mail[most_ranks][most_ranks];  // from, to
};

// The mapping of one id; ranks that are threads share it.
class Segment {
   public:
    explicit Segment(const std::string& name) : name_(name) {
        const int file = ::shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
        if (file < 0 || ::ftruncate(file, sizeof(Shared)) != 0) std::abort();
        void* pages = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (pages == MAP_FAILED) std::abort();
        ::close(file);
        shared_ = static_cast<Shared*>(pages);
    }
    ~Segment() {
        ::shm_unlink(name_.c_str());
        ::munmap(shared_, sizeof(Shared));
    }
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;

    [[nodiscard]] Shared* operator->() const { return shared_; }
    [[nodiscard]] const std::string& name() const { return name_; }
    // Once all ranks have it.
    void forget_name() const { ::shm_unlink(name_.c_str()); }

   private:
    const std::string name_;
    Shared* shared_;
};

struct Failure {
    std::string symbol;
    unsigned calls = 0;
    Result result = 0;
};

struct World {
    std::mutex mutex;  // guards all below
    std::map<std::string, std::weak_ptr<Segment>> segments;
    std::map<std::string, unsigned> calls;
    Failure failure;
    int hanging_rank = -1;
    std::map<int, Result> async_errors;
    int reported = 0;  // of these
    unsigned polls = 0;
    std::map<int, int> running;  // by rank
    int communicators = 0;
    uint64_t latency_ns = 0;
    uint64_t bytes_per_us = 0;  // 0: operations take no time of the simulated clock
};

World& world() {
    static World& one = *new World;
    return one;
}

std::shared_ptr<Segment> segment_of(const UniqueId& id) {
    const std::string name(id.bytes);
    const std::lock_guard lock(world().mutex);
    auto& known = world().segments[name];
    auto segment = known.lock();
    if (!segment) known = segment = std::make_shared<Segment>(name);
    return segment;
}

bool is_to_hang(int rank) {
    const std::lock_guard lock(world().mutex);
    if (world().hanging_rank != rank) return false;
    world().hanging_rank = -1;
    return true;
}

int version() {
    const char* text = std::getenv("TESSERA_MOCK_NCCL_VERSION");
    return text == nullptr ? 22907 : std::atoi(text);
}

// An injected failure, or success.
Result entered(const char* symbol) {
    const std::lock_guard lock(world().mutex);
    ++world().calls[symbol];
    Failure& failure = world().failure;
    if (failure.symbol != symbol) return success;
    if (failure.calls > 0) {
        --failure.calls;
        return success;
    }
    failure.symbol.clear();
    return failure.result;
}

struct Aborted {};

// What the calls on a communicator and its operations on streams share.
struct State {
    std::shared_ptr<Segment> shared;
    int rank = 0;
    int ranks = 0;
    bool blocking = true;
    std::atomic<Result> connected{in_progress};
    std::atomic<bool> aborted{false};
    std::atomic<unsigned> polls_left{0};
    std::thread connecting;  // or splitting
    unsigned splits = 0;

    std::mutex mutex;  // guards all below
    std::condition_variable changed;
    uint64_t issued = 0;
    uint64_t ended = 0;

    void wait_until(const std::function<bool()>& ready) const {
        for (unsigned round = 0; !ready(); ++round) {
            if (aborted) throw Aborted{};
            if (round < 100) {
                std::this_thread::yield();
            } else {
                std::this_thread::sleep_for(std::chrono::microseconds{50});
            }
        }
    }

    void connect() {
        try {
            (*shared)->joined.fetch_add(1);
            wait_until([this] { return (*shared)->joined == static_cast<uint32_t>(ranks); });
            shared->forget_name();
            connected = success;
        } catch (const Aborted&) {
            connected = system_error;
        }
    }

    void meet() {
        Shared& all = *shared->operator->();
        const uint32_t generation = all.generation;
        if (all.arrived.fetch_add(1) + 1 == static_cast<uint32_t>(ranks)) {
            all.arrived = 0;
            all.generation.fetch_add(1);
            return;
        }
        wait_until([&] { return all.generation != generation; });
    }
    [[nodiscard]] char* slot(int of) const { return (*shared)->slots[of].data; }
};

// --- elements

template <class T>
T combined(T a, T b, int op) {
    switch (op) {
        case 1: return static_cast<T>(a * b);
        case 2: return std::max(a, b);
        case 3: return std::min(a, b);
        default: return static_cast<T>(a + b);
    }
}

// Reduces the ranks' elements in their order, in Wide, which is converted once.
template <class T, class Wide, class Load, class Store>
void reduce_as(const State& state, char* out, size_t count, int op, Load load, Store store) {
    for (size_t i = 0; i < count; ++i) {
        const auto element = [&](int rank) {
            T value{};
            std::memcpy(&value, state.slot(rank) + i * sizeof(T), sizeof(T));
            return static_cast<Wide>(load(value));
        };
        Wide sum = element(0);
        for (int rank = 1; rank < state.ranks; ++rank) sum = combined(sum, element(rank), op);
        if (op == 4) sum = static_cast<Wide>(sum / static_cast<Wide>(state.ranks));
        const auto result = static_cast<T>(store(sum));
        std::memcpy(out + i * sizeof(T), &result, sizeof(T));
    }
}

constexpr size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

// e4m3, which has no infinities, or e5m2, by the number of their mantissa's bits.
template <int mantissa>
float widen_f8(uint8_t bits) {
    constexpr int bias = mantissa == 3 ? 7 : 15;
    const int exponent = (bits & 0x7f) >> mantissa;
    const int fraction = bits & ((1 << mantissa) - 1);
    const bool is_special = mantissa == 3 ? (bits & 0x7f) == 0x7f : exponent == 31;
    if (is_special && (mantissa == 3 || fraction != 0)) return std::numeric_limits<float>::quiet_NaN();
    const float sign = bits < 0x80 ? 1.0F : -1.0F;
    if (is_special) return sign * std::numeric_limits<float>::infinity();
    const int whole = exponent == 0 ? fraction : fraction + (1 << mantissa);
    return sign * std::ldexp(static_cast<float>(whole), std::max(exponent, 1) - bias - mantissa);
}

// The nearest, of two the even one; beyond the largest finite number, that one.
template <int mantissa>
uint8_t narrow_f8(float value) {
    if (std::isnan(value)) return 0x7f;
    uint8_t best = 0;
    float distance = std::numeric_limits<float>::infinity();
    for (uint8_t bits = 0; bits < 0x7f; ++bits) {
        const float away = std::abs(widen_f8<mantissa>(bits) - std::abs(value));
        if (!(away < distance || (away == distance && bits % 2 == 0))) continue;
        best = bits;
        distance = away;
    }
    return static_cast<uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

void reduce_chunk(const State& state, char* out, size_t count, int dtype, int op) {
    const auto same = [](auto value) { return value; };
    const auto widen = [](auto narrow) { return tsr::widen(narrow); };
    switch (dtype) {
        case 0: return reduce_as<int8_t, int32_t>(state, out, count, op, same, same);
        case 1: return reduce_as<uint8_t, uint32_t>(state, out, count, op, same, same);
        case 2: return reduce_as<int32_t, int64_t>(state, out, count, op, same, same);
        case 3: return reduce_as<uint32_t, uint64_t>(state, out, count, op, same, same);
        case 4: return reduce_as<int64_t, int64_t>(state, out, count, op, same, same);
        case 5: return reduce_as<uint64_t, uint64_t>(state, out, count, op, same, same);
        case 6:
            return reduce_as<tsr::Half, float>(state, out, count, op, widen,
                                               [](float sum) { return tsr::narrow_half(sum); });
        case 7: return reduce_as<float, float>(state, out, count, op, same, same);
        case 8: return reduce_as<double, double>(state, out, count, op, same, same);
        case 10: return reduce_as<uint8_t, float>(state, out, count, op, widen_f8<3>, narrow_f8<3>);
        case 11: return reduce_as<uint8_t, float>(state, out, count, op, widen_f8<2>, narrow_f8<2>);
        default:
            return reduce_as<tsr::BFloat, float>(state, out, count, op, widen,
                                                 [](float sum) { return tsr::narrow_bfloat(sum); });
    }
}

// --- operations

enum class Kind { all_reduce, reduce, broadcast, reduce_scatter, all_gather, send, recv };

struct Op {
    Kind kind = Kind::all_reduce;
    const void* in = nullptr;
    void* out = nullptr;
    size_t count = 0;  // of the smaller side
    int dtype = 0;
    int op = 0;
    int peer = 0;  // or the root

    [[nodiscard]] size_t size() const { return count * sizes[dtype]; }
};

struct IllegalAddress {};

template <class T>
char* bytes(T* address, size_t size) {
    if (size == 0) return nullptr;
    void* found = simulated_cuda_bytes(address, size);
    if (found == nullptr) throw IllegalAddress{};
    return static_cast<char*>(found);
}

void run_collective(State& state, const Op& op) {
    const size_t size = op.size();
    const auto ranks = static_cast<size_t>(state.ranks);
    const size_t all = size * ranks;
    const bool is_root = state.rank == op.peer;
    const auto each_chunk = [&](const std::function<void(size_t at, size_t length)>& body) {
        for (size_t at = 0; at < size; at += chunk_size) body(at, std::min(chunk_size, size - at));
    };
    switch (op.kind) {
        case Kind::all_reduce:
        case Kind::reduce: {
            const bool writes = op.kind == Kind::all_reduce || is_root;
            const char* in = bytes(op.in, size);
            char* out = writes ? bytes(op.out, size) : nullptr;
            return each_chunk([&](size_t at, size_t length) {
                std::memcpy(state.slot(state.rank), in + at, length);
                state.meet();
                if (writes) reduce_chunk(state, out + at, length / sizes[op.dtype], op.dtype, op.op);
                state.meet();
            });
        }
        case Kind::broadcast: {
            const char* in = is_root ? bytes(op.in, size) : nullptr;
            char* out = bytes(op.out, size);
            return each_chunk([&](size_t at, size_t length) {
                if (is_root) std::memcpy(state.slot(state.rank), in + at, length);
                state.meet();
                std::memcpy(out + at, state.slot(op.peer), length);
                state.meet();
            });
        }
        case Kind::reduce_scatter: {
            const char* in = bytes(op.in, all);
            char* out = bytes(op.out, size);
            return each_chunk([&](size_t at, size_t length) {
                for (int part = 0; part < state.ranks; ++part) {
                    std::memcpy(state.slot(state.rank), in + static_cast<size_t>(part) * size + at, length);
                    state.meet();
                    if (part == state.rank) reduce_chunk(state, out + at, length / sizes[op.dtype], op.dtype, op.op);
                    state.meet();
                }
            });
        }
        case Kind::all_gather: {
            const char* in = bytes(op.in, size);
            char* out = bytes(op.out, all);
            return each_chunk([&](size_t at, size_t length) {
                std::memcpy(state.slot(state.rank), in + at, length);
                state.meet();
                for (int part = 0; part < state.ranks; ++part) {
                    std::memcpy(out + static_cast<size_t>(part) * size + at, state.slot(part), length);
                }
                state.meet();
            });
        }
        case Kind::send:
        case Kind::recv: return;
    }
}

// The collectives of a group together: they begin when the last rank gets there.
void take_time(State& state, const std::vector<Op>& ops) {
    uint64_t latency = 0;
    uint64_t rate = 0;
    {
        const std::lock_guard lock(world().mutex);
        latency = world().latency_ns;
        rate = world().bytes_per_us;
    }
    if (rate == 0) return;
    size_t size = 0;
    for (const Op& op : ops) {
        if (op.kind == Kind::send || op.kind == Kind::recv) return;
        const bool is_cut = op.kind == Kind::all_gather || op.kind == Kind::reduce_scatter;
        size += is_cut ? op.size() * static_cast<size_t>(state.ranks) : op.size();
    }
    Shared& all = *state.shared->operator->();
    all.clocks[state.rank] = simulated_cuda_now();
    state.meet();
    uint64_t begin = 0;
    for (int rank = 0; rank < state.ranks; ++rank) begin = std::max(begin, all.clocks[rank].load());
    state.meet();
    simulated_cuda_take_until(begin + latency + size * 1000 / rate);
}

// The messages of a group, all at once, as far as each can go.
void run_messages(State& state, const std::vector<Op>& ops) {
    struct Message {
        const Op* op;
        size_t moved = 0;
    };
    std::vector<Message> left;
    for (const Op& op : ops) {
        if ((op.kind == Kind::send || op.kind == Kind::recv) && op.size() > 0) left.push_back({&op});
    }
    // Several of one direction between two ranks go one after the other.
    const auto is_first = [&](const Message& message) {
        return std::ranges::none_of(left, [&](const Message& other) {
            return &other < &message && other.op->kind == message.op->kind && other.op->peer == message.op->peer;
        });
    };
    const auto advance = [&](Message& message) {
        const Op& op = *message.op;
        const bool sends = op.kind == Kind::send;
        Mailbox& box = (*state.shared)->mail[sends ? state.rank : op.peer][sends ? op.peer : state.rank];
        if ((box.full != 0) == sends) return false;
        if (sends) {
            box.size = static_cast<uint32_t>(std::min(sizeof box.data, op.size() - message.moved));
            std::memcpy(box.data, bytes(op.in, op.size()) + message.moved, box.size);
        } else {
            std::memcpy(bytes(op.out, op.size()) + message.moved, box.data,
                        std::min<size_t>(box.size, op.size() - message.moved));
        }
        message.moved += box.size;
        box.full = sends ? 1 : 0;
        return true;
    };
    while (!left.empty()) {
        bool moved = false;
        state.wait_until([&] {
            for (Message& message : left) {
                if (is_first(message) && message.moved < message.op->size()) moved = advance(message) || moved;
            }
            return moved;
        });
        std::erase_if(left, [](const Message& message) { return message.moved >= message.op->size(); });
    }
}

// What one call, or one group of calls, puts on a stream.
struct Batch {
    std::shared_ptr<State> state;
    void* stream = nullptr;
    std::vector<Op> ops;
    uint64_t number = 0;       // in the order of the communicator;
    bool is_captured = false;  // then each run has its own
};

// A device that has failed runs nothing, but what is on its streams comes to an end.
void end_batch(void* argument) {
    const std::unique_ptr<Batch> batch(static_cast<Batch*>(argument));
    if (batch->is_captured) return;
    State& state = *batch->state;
    {
        const std::lock_guard lock(world().mutex);
        --world().running[state.rank];
    }
    const std::lock_guard lock(state.mutex);
    ++state.ended;
    state.changed.notify_all();
}

int run_batch(void* argument) {
    const auto* batch = static_cast<const Batch*>(argument);
    State& state = *batch->state;
    int error = 0;
    uint64_t number = batch->number;
    if (batch->is_captured) {
        const std::lock_guard lock(state.mutex);
        number = state.issued++;
    }
    try {
        state.wait_until([&] {
            const std::lock_guard lock(state.mutex);
            return state.ended == number;
        });
        if (is_to_hang(state.rank)) state.wait_until([] { return false; });
        if (state.aborted) throw Aborted{};  // others may still be in what this rank has left
        take_time(state, batch->ops);
        for (const Op& op : batch->ops) run_collective(state, op);
        run_messages(state, batch->ops);
    } catch (const Aborted&) {  // NOLINT(bugprone-empty-catch): the kernel ends; its output is undefined
    } catch (const IllegalAddress&) {
        error = illegal_address;
    }
    if (batch->is_captured) {
        const std::lock_guard lock(state.mutex);
        ++state.ended;
        state.changed.notify_all();
    }
    return error;
}

}  // namespace

struct ncclComm {
    std::shared_ptr<State> state;
};

namespace {

thread_local int group_depth = 0;
thread_local std::vector<Batch> group;

Result launch(Batch batch) {
    State& state = *batch.state;
    void* stream = batch.stream;
    batch.is_captured = simulated_cuda_captures(stream) != 0;
    if (!batch.is_captured) {
        const std::lock_guard lock(state.mutex);
        batch.number = state.issued++;
        const std::lock_guard all(world().mutex);
        ++world().running[state.rank];
    }
    auto* moved = new Batch(std::move(batch));
    const int error = simulated_cuda_launch_until(stream, run_batch, end_batch, moved);
    if (error == 0) return success;
    if (!moved->is_captured) {
        const std::lock_guard lock(state.mutex);
        const std::lock_guard all(world().mutex);
        --world().running[state.rank];
        ++state.ended;
    }
    delete moved;
    return 1;  // ncclUnhandledCudaError
}

Result settle_slowly(State& state) {
    if (state.blocking) return success;
    const std::lock_guard lock(world().mutex);
    state.polls_left = world().polls;
    return world().polls > 0 ? in_progress : success;
}

Result call(const char* symbol, ncclComm* comm, void* stream, const Op& op) {
    if (const Result result = entered(symbol); result != success) return result;
    if (comm == nullptr) return invalid_argument;
    State& state = *comm->state;
    if (state.connected == in_progress) return invalid_usage;
    const int last_type = version() >= tsr::nccl::oldest_with_f8 ? 11 : 9;
    if (op.dtype < 0 || op.dtype > last_type || op.op < 0 || op.op > 4 || op.peer < 0 || op.peer >= state.ranks)
        return invalid_argument;
    if (group_depth == 0) {
        if (const Result result = launch({comm->state, stream, {op}}); result != success) return result;
        return settle_slowly(state);
    }
    const auto same = std::ranges::find_if(
        group, [&](const Batch& batch) { return batch.state == comm->state && batch.stream == stream; });
    if (same != group.end()) {
        same->ops.push_back(op);
    } else {
        group.push_back({comm->state, stream, {op}});
    }
    return success;
}

// The ranks of a communicator tell each other where they go, and meet again there.
Result split(State& parent, int color, int key, bool blocking, ncclComm** made) {
    Shared& all = *parent.shared->operator->();
    try {
        if (is_to_hang(parent.rank)) parent.wait_until([] { return false; });
        all.choices[parent.rank] = {color, key};
        parent.meet();
        std::vector<std::pair<int, int>> members;  // keys and ranks
        for (int rank = 0; rank < parent.ranks; ++rank) {
            if (all.choices[rank].color == color) members.emplace_back(all.choices[rank].key, rank);
        }
        parent.meet();
        const unsigned number = parent.splits++;
        if (color == tsr::nccl::no_color) return success;
        std::ranges::sort(members);
        const std::string origin = parent.shared->name() + "/" + std::to_string(number) + "/" + std::to_string(color);
        UniqueId id{};
        std::snprintf(id.bytes, sizeof id.bytes, "/tessera-mock-nccl-%016zx", std::hash<std::string>{}(origin));
        auto part = std::make_shared<State>();
        part->shared = segment_of(id);
        part->ranks = static_cast<int>(members.size());
        part->rank = static_cast<int>(std::ranges::find(members, std::pair(key, parent.rank)) - members.begin());
        part->blocking = blocking;
        (*part->shared)->joined.fetch_add(1);
        parent.wait_until([&] { return (*part->shared)->joined == static_cast<uint32_t>(part->ranks); });
        part->shared->forget_name();
        part->connected = success;
        const std::lock_guard lock(world().mutex);
        ++world().communicators;
        *made = new ncclComm{part};
        return success;
    } catch (const Aborted&) {
        return system_error;
    }
}

void release(ncclComm* comm) {
    State& state = *comm->state;
    if (state.connecting.joinable()) state.connecting.join();
    {
        std::unique_lock lock(state.mutex);
        state.changed.wait(lock, [&] { return state.ended == state.issued; });
    }
    delete comm;
    const std::lock_guard lock(world().mutex);
    --world().communicators;
}

}  // namespace

extern "C" {

EXPORTED void mock_nccl_fail(const char* symbol, unsigned calls, int result) {
    const std::lock_guard lock(world().mutex);
    world().failure = {symbol == nullptr ? "" : symbol, calls, result};
}
EXPORTED void mock_nccl_hang(int rank) {
    const std::lock_guard lock(world().mutex);
    world().hanging_rank = rank;
}
EXPORTED void mock_nccl_async_error(int rank, int result) {
    const std::lock_guard lock(world().mutex);
    world().async_errors[rank] = result;
    world().reported = 0;
}
EXPORTED int mock_nccl_reported(void) {
    const std::lock_guard lock(world().mutex);
    return world().reported;
}
EXPORTED void mock_nccl_slow(unsigned polls) {
    const std::lock_guard lock(world().mutex);
    world().polls = polls;
}
EXPORTED int mock_nccl_running(int rank) {
    const std::lock_guard lock(world().mutex);
    return world().running[rank];
}
EXPORTED unsigned mock_nccl_calls(const char* symbol) {
    const std::lock_guard lock(world().mutex);
    return world().calls[symbol];
}
EXPORTED int mock_nccl_communicators() {
    const std::lock_guard lock(world().mutex);
    return world().communicators;
}

EXPORTED void mock_nccl_speed(uint64_t latency_ns, uint64_t bytes_per_us) {
    const std::lock_guard lock(world().mutex);
    world().latency_ns = latency_ns;
    world().bytes_per_us = bytes_per_us;
}

EXPORTED Result ncclGetVersion(int* version) {
    *version = ::version();
    return success;
}

EXPORTED Result ncclGetUniqueId(UniqueId* id) {
    if (const Result result = entered("ncclGetUniqueId"); result != success) return result;
    std::random_device random;
    *id = {};
    std::snprintf(id->bytes, sizeof id->bytes, "/tessera-mock-nccl-%d-%08x%08x", ::getpid(), random(), random());
    return success;
}

EXPORTED Result ncclCommInitRankConfig(ncclComm** comm, int ranks, UniqueId id, int rank, Config* config) {
    if (const Result result = entered("ncclCommInitRankConfig"); result != success) return result;
    if (ranks < 1 || ranks > most_ranks || rank < 0 || rank >= ranks) return invalid_argument;
    if (config != nullptr && (config->magic != 0xcafebeef || config->size < sizeof(Config))) return invalid_argument;
    auto state = std::make_shared<State>();
    state->shared = segment_of(id);
    state->rank = rank;
    state->ranks = ranks;
    state->blocking = config == nullptr || config->blocking != 0;
    {
        const std::lock_guard lock(world().mutex);
        ++world().communicators;
    }
    *comm = new ncclComm{state};
    if (state->blocking) {
        state->connect();
        return state->connected;
    }
    state->connecting = std::thread([state] { state->connect(); });
    return in_progress;
}

// NCCL may wait for ever if operations are in progress, so these are refused here.
EXPORTED Result ncclCommSplit(ncclComm* comm, int color, int key, ncclComm** made, Config* config) {
    if (const Result result = entered("ncclCommSplit"); result != success) return result;
    if (config == nullptr || color < tsr::nccl::no_color) return invalid_argument;
    State& state = *comm->state;
    if (state.connected != success) return invalid_usage;
    {
        const std::lock_guard lock(state.mutex);
        if (state.issued != state.ended) return invalid_usage;
    }
    if (state.connecting.joinable()) state.connecting.join();
    *made = nullptr;
    state.connected = in_progress;
    const auto run = [parent = comm->state, color, key, made, blocking = config->blocking != 0] {
        parent->connected = split(*parent, color, key, blocking, made);
    };
    if (state.blocking) {
        run();
        return state.connected;
    }
    state.connecting = std::thread(run);
    return in_progress;
}

EXPORTED Result ncclCommFinalize(ncclComm* comm) {
    if (const Result result = entered("ncclCommFinalize"); result != success) return result;
    return settle_slowly(*comm->state);
}

EXPORTED Result ncclCommDestroy(ncclComm* comm) {
    if (const Result result = entered("ncclCommDestroy"); result != success) return result;
    release(comm);
    return success;
}

EXPORTED Result ncclCommAbort(ncclComm* comm) {
    comm->state->aborted = true;
    release(comm);
    return success;
}

EXPORTED Result ncclCommGetAsyncError(ncclComm* comm, Result* error) {
    State& state = *comm->state;
    {
        const std::lock_guard lock(world().mutex);
        const auto found = world().async_errors.find(state.rank);
        if (found != world().async_errors.end() && found->second != success) {
            *error = found->second;
            ++world().reported;
            return success;
        }
    }
    *error = state.connected;
    if (*error == success && state.polls_left > 0) {
        --state.polls_left;
        *error = in_progress;
    }
    return success;
}

EXPORTED const char* ncclGetErrorString(Result result) {
    static const char* const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return result >= 0 && result < 8 ? texts[result] : "unknown result code";
}

EXPORTED const char* ncclGetLastError(ncclComm* /*comm*/) { return ""; }

EXPORTED Result ncclGroupStart() {
    if (const Result result = entered("ncclGroupStart"); result != success) return result;
    ++group_depth;
    return success;
}

EXPORTED Result ncclGroupEnd() {
    if (group_depth == 0) return invalid_usage;
    if (--group_depth > 0) return success;
    std::vector<Batch> batches;
    batches.swap(group);
    if (const Result result = entered("ncclGroupEnd"); result != success) return result;
    Result last = success;
    for (Batch& batch : batches) {
        State& state = *batch.state;
        if (const Result result = launch(std::move(batch)); result != success) return result;
        last = settle_slowly(state);
    }
    return last;
}

EXPORTED Result ncclAllReduce(const void* in, void* out, size_t count, int dtype, int op, ncclComm* comm,
                              void* stream) {
    return call("ncclAllReduce", comm, stream, {Kind::all_reduce, in, out, count, dtype, op, 0});
}
EXPORTED Result ncclReduce(const void* in, void* out, size_t count, int dtype, int op, int root, ncclComm* comm,
                           void* stream) {
    return call("ncclReduce", comm, stream, {Kind::reduce, in, out, count, dtype, op, root});
}
EXPORTED Result ncclBroadcast(const void* in, void* out, size_t count, int dtype, int root, ncclComm* comm,
                              void* stream) {
    return call("ncclBroadcast", comm, stream, {Kind::broadcast, in, out, count, dtype, 0, root});
}
EXPORTED Result ncclReduceScatter(const void* in, void* out, size_t count, int dtype, int op, ncclComm* comm,
                                  void* stream) {
    return call("ncclReduceScatter", comm, stream, {Kind::reduce_scatter, in, out, count, dtype, op, 0});
}
EXPORTED Result ncclAllGather(const void* in, void* out, size_t count, int dtype, ncclComm* comm, void* stream) {
    return call("ncclAllGather", comm, stream, {Kind::all_gather, in, out, count, dtype, 0, 0});
}
EXPORTED Result ncclSend(const void* in, size_t count, int dtype, int peer, ncclComm* comm, void* stream) {
    return call("ncclSend", comm, stream, {Kind::send, in, nullptr, count, dtype, 0, peer});
}
EXPORTED Result ncclRecv(void* out, size_t count, int dtype, int peer, ncclComm* comm, void* stream) {
    return call("ncclRecv", comm, stream, {Kind::recv, nullptr, out, count, dtype, 0, peer});
}

}  // extern "C"
