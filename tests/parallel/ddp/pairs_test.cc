// Pairs of DDP's options, chosen by a seed, against what the test computes from all ranks' gradients. TESSERA_TEST_SEED
// gives a run again.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <set>

#include "optim/sgd.hpp"
#include "parallel/model.hpp"
#include "ranks.hpp"
#include "seed.hpp"
#include "tensor/convert.hpp"
#include "with_grads.hpp"

namespace tsr {
namespace {

using testing::expect_all_well;
using testing::run_ranks;
using testing::shared;
using testing::test_options;

enum class Feature {
    sum,
    pre_divide,
    find_unused,
    static_graph,
    rebuild,
    bf16,
    power_sgd,
    noop,
    callback,
    join_by_world,
    join_by_active,
    no_sync,
    step_in_backward,
    buffers,
    last = buffers,
};
constexpr int features = static_cast<int>(Feature::last) + 1;
constexpr std::array<const char*, features> names{
    "sum",      "pre_divide",    "find_unused",    "static_graph", "rebuild",          "bf16",   "power_sgd", "noop",
    "callback", "join_by_world", "join_by_active", "no_sync",      "step_in_backward", "buffers"};

using Chosen = std::set<Feature>;

std::string text(const Chosen& chosen) {
    std::string all;
    for (const Feature feature : chosen) all += fmt::format("{} ", names.at(static_cast<size_t>(feature)));
    return all;
}

// The model: two vectors, a matrix that PowerSGD compresses, a f64 vector, one that odd ranks use, one that none uses.
struct Spec {
    Dims shape;
    DType dtype;
};
const std::array<Spec, 6> specs{{{{300}, DType::f32},
                                 {{20, 30}, DType::f32},
                                 {{33}, DType::f32},
                                 {{7}, DType::f64},
                                 {{40}, DType::f32},
                                 {{12}, DType::f32}}};
constexpr int steps = 4;

class Case {
   public:
    Case(int world, Chosen chosen) : world_(world), chosen_(std::move(chosen)) {}

    [[nodiscard]] bool has(Feature feature) const { return chosen_.contains(feature); }
    [[nodiscard]] bool joins() const { return has(Feature::join_by_world) || has(Feature::join_by_active); }
    [[nodiscard]] bool some_unused() const { return has(Feature::find_unused) || has(Feature::static_graph); }
    [[nodiscard]] int micro_steps() const { return has(Feature::no_sync) ? 3 : 1; }
    [[nodiscard]] int steps_of(int rank) const { return joins() ? steps - rank % 2 : steps; }
    [[nodiscard]] bool uses(int rank, size_t param) const {
        return !some_unused() || param < 4 || (param == 4 && rank % 2 == 1);
    }

    // What a micro-step adds. Of the matrix: multiples of one outer product, which PowerSGD gives whole.
    [[nodiscard]] static double part(int rank, int step, int micro, size_t param, size_t k) {
        const auto wave = [](double x) { return std::sin(x); };
        const double scale = wave(rank * 1.7 + step * 0.9 + micro * 0.3 + static_cast<double>(param)) + 1.5;
        if (param == 1)
            return scale * wave(static_cast<double>(k / 30) + 0.4) * wave(static_cast<double>(k % 30) * 1.3);
        return scale * wave(static_cast<double>(k) * 0.77 + rank + param);
    }
    [[nodiscard]] double own(int rank, int step, size_t param, size_t k) const {
        double sum = 0;
        for (int micro = 0; uses(rank, param) && micro < micro_steps(); ++micro)
            sum += part(rank, step, micro, param, k);
        return sum;
    }

    // The gradient of `rank` after a step, and how far rounding may lead from it; `before`: what was there.
    [[nodiscard]] std::pair<double, double> expected(int rank, int step, size_t param, size_t k, double before) const {
        int active = 0;
        bool used = false;
        double sum = 0;
        double size = 0;
        for (int r = 0; r < world_; ++r) {
            // In a static graph the first step tells, also of ranks that have joined since.
            if (has(Feature::static_graph)) used = used || uses(r, param);
            if (steps_of(r) <= step) continue;
            ++active;
            used = used || uses(r, param);
            const double g = own(r, step, param, k);
            sum += g;
            size += std::abs(g);
        }
        if (!used) return {before, 0};
        if (has(Feature::noop) && !has(Feature::callback)) return {own(rank, step, param, k), 1e-6};
        const bool avg = !has(Feature::sum) || has(Feature::callback);  // this test's callback averages
        const double by = !avg ? 1 : has(Feature::join_by_active) && !has(Feature::callback) ? active : world_;
        const bool is_bf16 =
            has(Feature::bf16) && !has(Feature::callback) && !(has(Feature::power_sgd) && param == 1 && step >= 1);
        return {sum / by, size / by * (is_bf16 ? 0.02 : 2e-5) + 2e-5};
    }

    [[nodiscard]] DdpOptions options() const {
        DdpOptions o;
        o.bucket_bytes = 2000;
        o.first_bucket_bytes = 200;
        if (has(Feature::sum)) o.op = ReduceOp::sum;
        if (has(Feature::pre_divide)) o.pre_divide = 3;
        o.find_unused = has(Feature::find_unused);
        o.static_graph = has(Feature::static_graph);
        o.rebuild_buckets = has(Feature::rebuild);
        if (has(Feature::bf16)) o.reduce_dtype = DType::bf16;
        if (has(Feature::power_sgd)) o.hook = DdpHook::power_sgd;
        if (has(Feature::noop)) o.hook = DdpHook::noop;
        o.power_sgd_start_step = 1;
        if (has(Feature::join_by_world)) o.join = DdpJoin::divide_by_world;
        if (has(Feature::join_by_active)) o.join = DdpJoin::divide_by_active;
        return o;
    }

    void run(Communicator& comm) const;

   private:
    int world_;
    Chosen chosen_;
};

double element(const Tensor& tensor, size_t k) {
    return tensor.dtype == DType::f64 ? tensor.as<double>()[k] : double{tensor.as<float>()[k]};
}

void set(const Tensor& tensor, size_t k, double value) {
    if (tensor.dtype == DType::f64) {
        tensor.as<double>()[k] = value;
    } else {
        tensor.as<float>()[k] = static_cast<float>(value);
    }
}

void Case::run(Communicator& comm) const {
    const int rank = comm.rank();
    std::vector<std::vector<double>> memory;  // doubles also where floats lie: aligned
    std::vector<NamedTensor> params;
    for (const Spec& spec : specs) {
        memory.emplace_back(static_cast<size_t>(spec.shape.product()), 0.0);
        params.push_back({fmt::format("p{}", params.size()),
                          {reinterpret_cast<std::byte*>(memory.back().data()), spec.shape, spec.dtype, {}}});
    }
    Ddp ddp(shared(comm), params, options());
    if (has(Feature::callback)) {
        ddp.set_hook([&](const BucketView& bucket) {
            comm.run({.collective = Collective::all_reduce, .outputs = bucket.grads, .op = ReduceOp::avg});
        });
    }
    Sgd optimizer(testing::with_grads(ddp), {.lr = 0.5});
    if (has(Feature::step_in_backward)) ddp.step_in_backward(optimizer);
    std::array<int64_t, 2> counters{rank, rank};
    if (has(Feature::buffers)) ddp.register_buffers({{"n", tensor_of(std::span<int64_t>(counters), DType::i64)}});

    std::vector<std::vector<double>> values(specs.size());  // the parameters, as they should be
    std::vector<std::vector<double>> slack(specs.size());
    for (size_t p = 0; p < specs.size(); ++p) {
        values[p].assign(memory[p].size(), 0);
        slack[p].assign(memory[p].size(), 0);
        for (size_t k = 0; k < memory[p].size(); ++k) set(ddp.grad(p), k, p == 5 ? 0.25 : 0);
    }
    for (int step = 0; step < steps_of(rank); ++step) {
        if (has(Feature::buffers)) {
            counters.fill(10 * step + rank);
            ddp.broadcast_buffers();
            ASSERT_EQ(counters[1], 10 * step);
        }
        std::vector<std::vector<double>> before(specs.size());
        for (size_t p = 0; p < specs.size(); ++p) {
            for (size_t k = 0; k < memory[p].size(); ++k) before[p].push_back(element(ddp.grad(p), k));
        }
        for (int micro = 0; micro < micro_steps(); ++micro) {
            ddp.set_sync(micro + 1 == micro_steps());
            std::array<size_t, 6> order{0, 1, 2, 3, 4, 5};
            std::mt19937 random(static_cast<unsigned>(100 * step + 10 * rank + micro));
            std::shuffle(order.begin(), order.end(), random);
            for (const size_t p : order) {
                if (!uses(rank, p)) continue;
                for (size_t k = 0; k < memory[p].size(); ++k) {
                    const double had = micro == 0 ? 0 : element(ddp.grad(p), k);
                    set(ddp.grad(p), k, had + part(rank, step, micro, p, k));
                }
                ddp.ready(p);
            }
            ddp.wait();
        }
        for (size_t p = 0; p < specs.size(); ++p) {
            for (size_t k = 0; k < memory[p].size(); ++k) {
                const auto [gradient, near] = expected(rank, step, p, k, before[p][k]);
                ASSERT_NEAR(element(ddp.grad(p), k), gradient, near)
                    << "rank " << rank << " step " << step << " parameter " << p << " element " << k;
                values[p][k] -= 0.5 * gradient;
                slack[p][k] += 0.5 * near + 1e-6;
            }
        }
        if (!has(Feature::step_in_backward)) optimizer.step();
        for (size_t p = 0; p < specs.size(); ++p) {
            for (size_t k = 0; k < memory[p].size(); ++k) {
                ASSERT_NEAR(element(ddp.param(p).tensor, k), values[p][k], slack[p][k]) << "parameter " << p;
            }
        }
    }
    if (joins()) ddp.join(false);
}

void run_case(int world, const Chosen& chosen) {
    SCOPED_TRACE(fmt::format("{} ranks: {}", world, text(chosen)));
    expect_all_well(run_ranks(world, test_options(), [&](Communicator& comm) { Case(world, chosen).run(comm); }));
}

TEST(DdpPairs, EachOptionAlone) {
    for (int feature = 0; feature < features; ++feature) run_case(3, {static_cast<Feature>(feature)});
}

TEST(DdpPairs, ASeededSubset) {
    const testing::Seed seed;
    std::mt19937 random(seed);
    for (int i = 0; i < 24; ++i) {
        Chosen chosen;
        while (chosen.size() < 2) chosen.insert(static_cast<Feature>(random() % features));
        // Two values of one option.
        if (chosen == Chosen{Feature::power_sgd, Feature::noop}) continue;
        if (chosen == Chosen{Feature::join_by_world, Feature::join_by_active}) continue;
        run_case(2 + static_cast<int>(random() % 3), chosen);
        if (::testing::Test::HasFailure()) return;
    }
}

}  // namespace
}  // namespace tsr
