// Tensor parallelism on CUDA devices, which are simulated (simulated_cuda/control.h), with a mock of NCCL
// (mock_nccl/control.h): each operation is made on the CPU and on a device, and gives the same. Ranks are threads, each with a
// device of its own and a stream whose operations are delayed at random.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/captured_graph.hpp"
#include "mock_nccl/fixture.hpp"
#include "optim/adam.hpp"
#include "parallel/tensor/cross_entropy.hpp"
#include "parallel/tensor/embedding.hpp"
#include "parallel/tensor/mlp.hpp"
#include "simulated_cuda/hold.hpp"
#include "tensor/convert.hpp"
#include "train/optimizer_of.hpp"

namespace tsr {
namespace {

using namespace testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Numbers = std::vector<double>;

CommOptions on_devices() { return test_options(("cpu:" + std::string(test_backend()) + ",cuda:nccl").c_str()); }

// Where a rank computes: on its device, in the order of a stream, or on the CPU.
class Place {
   public:
    explicit Place(std::optional<Device> device = {})
        : device_(device.value_or(Device{})), api_(device_api(device_)), stream_(api_.new_stream()) {}
    ~Place() { api_.record(stream())->wait(soon()); }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

    [[nodiscard]] bool is_device() const { return device_.type != DeviceType::cpu; }
    [[nodiscard]] DeviceApi& api() const { return api_; }
    [[nodiscard]] StreamHandle stream() const { return stream_.get(); }

    Tensor room(const Dims& shape, DType dtype = DType::f64) {
        Tensor tensor{nullptr, shape, dtype, device_};
        memory_.push_back(api_.allocate_zeroed(tensor.size_bytes()));
        tensor.data = memory_.back().get();
        return tensor;
    }
    template <class T>
    Tensor put(const std::vector<T>& values, const Dims& shape, DType dtype) {
        const Tensor tensor = room(shape, dtype);
        api_.copy(tensor.data, reinterpret_cast<const std::byte*>(values.data()), tensor.size_bytes(), stream());
        return tensor;
    }
    Tensor put(const Numbers& numbers, const Dims& shape, DType dtype = DType::f64) {
        return put(converted(numbers, dtype), shape, dtype);
    }
    void write(const Tensor& tensor, const Numbers& numbers) {
        const std::vector<std::byte> bytes = converted(numbers, tensor.dtype);
        api_.copy(tensor.data, bytes.data(), bytes.size(), stream());
    }
    [[nodiscard]] Numbers get(const Tensor& tensor) const {
        std::vector<std::byte> bytes(tensor.size_bytes());
        api_.copy(bytes.data(), tensor.data, bytes.size(), stream());
        api_.record(stream())->wait(soon());
        Numbers numbers(static_cast<size_t>(tensor.numel()));
        convert(bytes.data(), tensor.dtype, reinterpret_cast<std::byte*>(numbers.data()), DType::f64, tensor.numel());
        return numbers;
    }

   private:
    static std::vector<std::byte> converted(const Numbers& numbers, DType dtype) {
        std::vector<std::byte> bytes(numbers.size() * size_of(dtype));
        convert(reinterpret_cast<const std::byte*>(numbers.data()), DType::f64, bytes.data(), dtype,
                static_cast<int64_t>(numbers.size()));
        return bytes;
    }

    const Device device_;
    DeviceApi& api_;
    const std::shared_ptr<void> stream_;
    std::vector<std::shared_ptr<std::byte>> memory_;
};

// The same on the CPU and then on the rank's device; both give the same numbers.
void both_places(Communicator& comm, const std::function<std::vector<Numbers>(Place&)>& body) {
    Place cpu;
    Place device(comm.device());
    const std::vector<Numbers> expected = body(cpu);
    EXPECT_EQ(body(device), expected);
}

TensorParallel any_model(Communicator& comm) {
    static Numbers weight{1, 2};
    const NamedTensor param{"w", tensor_of_shape(weight, Dims{2})};
    return {mesh_of(comm), {&param, 1}, {}, {}};
}

Numbers of_rank(const Communicator& comm, const Dims& shape) {
    return random_numbers(100 + static_cast<uint64_t>(comm.rank()), static_cast<size_t>(shape.product()));
}

class TpOnDevice : public MockNcclTest {};
class TpOnDevices : public MockNcclTest, public ::testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, TpOnDevices, ::testing::Values(1, 2, 4));

// --- activations

// Sizes that divide, that do not, and of which some ranks have nothing.
TEST_P(TpOnDevices, MoveActivationsAsTheCpuDoes) {
    simulated_cuda_delay(100, 5);
    const std::vector<Dims> shapes{{12, 4}, {5, 7}, {2, 3, 12}, {4, 0, 2}};
    expect_all_well(run_ranks(GetParam(), on_devices(), [&](Communicator& comm) {
        TensorParallel tp = any_model(comm);
        const int n = comm.world_size();
        for (const Dims& shape : shapes) {
            for (int dim = -1; dim < shape.ndim(); ++dim) {
                SCOPED_TRACE(::testing::Message() << shape.str() << " along " << dim);
                const Dims own = dim < 0 ? shape : part_shape(shape, dim, n, comm.rank());
                const Dims features{own[own.ndim() - 1]};
                both_places(comm, [&](Place& here) {
                    const Tensor whole = here.put(of_rank(comm, shape), shape);
                    const Tensor part = here.put(of_rank(comm, own), own);
                    const Tensor bias = here.put(random_numbers(3, static_cast<size_t>(features[0])), features);
                    std::vector<Tensor> results;
                    std::vector<WorkPtr> works;
                    for (const bool later : {false, true}) {
                        const auto move = [&](auto&& call, const Dims& out) {
                            results.push_back(here.room(out));
                            WorkPtr work;
                            call(results.back(), later ? &work : nullptr);
                            if (work) works.push_back(work);
                        };
                        const StreamHandle s = here.stream();
                        move([&](const Tensor& to, WorkPtr* w) { tp.enter(part, to, dim, s, w); }, shape);
                        move([&](const Tensor& to, WorkPtr* w) { tp.enter_backward(whole, to, dim, s, w); }, own);
                        move([&](const Tensor& to, WorkPtr* w) { tp.leave(whole, to, dim, &bias, s, w); }, own);
                        move([&](const Tensor& to, WorkPtr* w) { tp.leave_backward(part, to, dim, s, w); }, shape);
                        if (dim < 0) continue;
                        move([&](const Tensor& to, WorkPtr* w) { tp.gather(part, to, dim, s, w); }, shape);
                        move([&](const Tensor& to, WorkPtr*) { tp.split(whole, to, dim, s); }, own);
                    }
                    for (const WorkPtr& work : works) work->order(here.stream(), soon());
                    std::vector<Numbers> all;
                    for (const Tensor& result : results) all.push_back(here.get(result));
                    for (const WorkPtr& work : works) work->wait(soon());
                    return all;
                });
            }
        }
    }));
}

// A trainer that multiplies parts by copying them, on its stream.
struct Parts {
    Place& here;
    Tensor whole;
    Cut cut;

    void take(int place, const Tensor& part) const {
        const auto rank = static_cast<size_t>(place);
        here.api().copy_rows(cut.in(whole.data, rank), {part.data, cut.row(rank)}, cut.outer, cut.row(rank),
                             here.stream());
    }
    void give(int place, const Tensor& part) const {
        const auto rank = static_cast<size_t>(place);
        here.api().copy_rows({part.data, cut.row(rank)}, cut.in(whole.data, rank), cut.outer, cut.row(rank),
                             here.stream());
    }
};

TEST_P(TpOnDevices, MovePartsAsTheCpuDoes) {
    simulated_cuda_delay(100, 6);
    expect_all_well(run_ranks(GetParam(), on_devices(), [&](Communicator& comm) {
        TensorParallel tp = any_model(comm);
        for (const Dims& shape : {Dims{9, 4}, Dims{3, 10}, Dims{2, 5, 3}}) {
            for (int dim = 0; dim < shape.ndim(); ++dim) {
                SCOPED_TRACE(::testing::Message() << shape.str() << " along " << dim);
                const Dims own = part_shape(shape, dim, comm.world_size(), comm.rank());
                both_places(comm, [&](Place& here) {
                    const Tensor in = here.put(of_rank(comm, own), own);
                    const Tensor whole = here.room(shape);
                    const Tensor seen = here.room(shape);
                    const Parts gathered{here, seen, Cut(seen, dim, comm.world_size())};
                    tp.enter_parts(in, whole, dim, here.stream(),
                                   [&](int place, int64_t, const Tensor& part) { gathered.take(place, part); });
                    const Tensor summands = here.put(of_rank(comm, shape), shape);
                    const Parts given{here, summands, Cut(summands, dim, comm.world_size())};
                    const Dims features{own[own.ndim() - 1]};
                    const Tensor bias = here.put(random_numbers(3, static_cast<size_t>(features[0])), features);
                    const Tensor sum = here.room(own);
                    tp.leave_parts(sum, shape[dim], dim, &bias, here.stream(),
                                   [&](int place, int64_t, const Tensor& part) { given.give(place, part); });
                    return std::vector{here.get(whole), here.get(seen), here.get(sum)};
                });
            }
        }
    }));
}

TEST_F(TpOnDevice, NoCallWaitsForTheDevice) {
    expect_all_well(run_ranks(2, on_devices(), [&](Communicator& comm) {
        Place here(comm.device());
        Numbers values(8, 1);
        const NamedTensor param{"norm", here.put(values, Dims{8})};
        const TpRule rule{"norm", TpStyle::sequence, 0, {}};
        TensorParallel tp(mesh_of(comm), {&param, 1}, {&rule, 1}, {});
        const Dims shape{3, 6};
        const Dims own = part_shape(shape, 1, 2, comm.rank());
        const Tensor part = here.put(Numbers(9, 1.0 + comm.rank()), own);
        const Tensor whole = here.room(shape);
        const Tensor sum = here.room(own);
        here.write(tp.grad(0), Numbers(8, 1.0 + comm.rank()));
        tp.set_stream(here.stream());
        WorkPtr last;
        {
            const Hold hold(here.api(), here.stream());
            tp.enter(part, whole, 1, here.stream(), nullptr);
            WorkPtr later;
            tp.leave(whole, sum, 1, nullptr, here.stream(), &later);
            later->order(here.stream(), soon());
            const Parts parts{here, whole, Cut(whole, 1, 2)};
            tp.leave_parts(sum, 6, 1, nullptr, here.stream(),
                           [&](int place, int64_t, const Tensor& one) { parts.give(place, one); });
            tp.enter_parts(sum, whole, 1, here.stream(),
                           [&](int place, int64_t, const Tensor& one) { parts.take(place, one); });
            tp.sum_grads(nullptr);
            tp.sum_grads(&last);
            EXPECT_FALSE(last->done());
        }
        last->wait(soon());
        Numbers expected;
        for (int row = 0; row < 3; ++row) expected.insert(expected.end(), {2, 2, 2, 4, 4, 4});
        EXPECT_EQ(here.get(whole), expected);
        EXPECT_EQ(here.get(tp.grad(0)), Numbers(8, 6));
        tp.zero_grad();
        EXPECT_EQ(here.get(tp.grad(0)), Numbers(8, 0));
    }));
}

TEST_F(TpOnDevice, PartsThatAreNotComputedEndLikeOnTheCpu) {
    const Outcomes outcomes = run_ranks(2, on_devices(), [&](Communicator& comm) {
        Place here(comm.device());
        TensorParallel tp = any_model(comm);
        const Tensor part = here.put(Numbers(4, 1.0 + comm.rank()), Dims{4, 1});
        const Tensor whole = here.room(Dims{4, 2});
        const auto fails = [&](int, int64_t, const Tensor&) { throw Error(Code::user, "no"); };
        try {
            tp.enter_parts(part, whole, 1, here.stream(), fails);
            ADD_FAILURE() << "no error";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), Code::user);
        }
        EXPECT_EQ(here.get(whole), (Numbers{1, 2, 1, 2, 1, 2, 1, 2}));
        tp.leave_parts(part, 2, 1, nullptr, here.stream(), [&](int, int64_t, const Tensor&) {
            if (comm.rank() == 0) throw Error(Code::user, "no part");
        });
        WorkPtr work;
        tp.enter_backward(part, part, -1, here.stream(), &work);
        work->wait(soon());
    });
    ASSERT_TRUE(outcomes[0]);
    ASSERT_TRUE(outcomes[1]);
    EXPECT_EQ(outcomes[0]->code(), Code::user);
    EXPECT_EQ(outcomes[1]->code(), Code::aborted) << outcomes[1]->what();
}

TEST_F(TpOnDevice, WhatIsElsewhereIsRefused) {
    expect_all_well(run_ranks(2, on_devices(), [&](Communicator& comm) {
        Place here(comm.device());
        TensorParallel tp = any_model(comm);
        const auto refusal = [](Code code, const std::function<void()>& body) -> std::string {
            try {
                body();
            } catch (const Error& error) {
                EXPECT_EQ(error.code(), code);
                return error.what();
            }
            return "accepted";
        };
        const Tensor tensor = here.room(Dims{4});
        Numbers host(4);
        Tensor other = tensor_of_shape(host, Dims{4});
        const auto enter = [&](const Tensor& in) {
            return refusal(Code::invalid_argument, [&] { tp.enter(in, tensor, -1, here.stream(), nullptr); });
        };
        EXPECT_THAT(enter(other), HasSubstr("the devices differ"));
        other.device = tensor.device;
        EXPECT_THAT(enter(other), HasSubstr("is memory of the host"));
        Tensor far = tensor;
        far.device.index = 3;
        EXPECT_THAT(refusal(Code::invalid_argument, [&] { tp.enter(far, far, -1, here.stream(), nullptr); }),
                    HasSubstr("communicates from CUDA device"));
        EXPECT_THAT(refusal(Code::invalid_argument, [&] { tp.set_stream(here.stream()); }), HasSubstr("no streams"));
        const NamedTensor param{"w", tensor};
        const auto cpu_comm = comm.split(0, comm.rank(), test_options());
        const DeviceMesh cpu_mesh(*cpu_comm, MeshShape({"tp"}, {2}));
        EXPECT_THAT(refusal(Code::unsupported, [&] { TensorParallel(cpu_mesh, {&param, 1}, {}, {}); }),
                    HasSubstr("cpu:auto,cuda:nccl"));
    }));
}

// What needs no memory of the model may be part of a graph.
TEST_F(TpOnDevice, GraphsHaveWhatNeedsNoMemory) {
    expect_all_well(run_ranks(2, on_devices(), [&](Communicator& comm) {
        Place here(comm.device());
        TensorParallel tp = any_model(comm);
        const Tensor sum = here.put(Numbers(4, 1), Dims{2, 2});
        const Tensor part = here.room(Dims{2, 1});
        tp.enter_backward(sum, sum, -1, here.stream(), nullptr);
        comm.run({.collective = Collective::barrier});
        std::string refusal;
        const CapturedGraph graph(here.api(), here.stream(), [&] {
            tp.enter_backward(sum, sum, -1, here.stream(), nullptr);
            try {
                tp.enter_backward(sum, part, 1, here.stream(), nullptr);
            } catch (const Error& error) {
                EXPECT_EQ(error.code(), Code::invalid_state);
                refusal = error.what();
            }
        });
        EXPECT_THAT(refusal, HasSubstr("captured into a CUDA graph"));
        for (int round = 0; round < 2; ++round) graph.launch();
        EXPECT_EQ(here.get(sum), Numbers(4, 8));
        tp.comm()->finalize();
    }));
}

// --- models

TEST_F(TpOnDevice, SlicesTrainAsOnTheCpu) {
    simulated_cuda_delay(100, 7);
    expect_all_well(run_ranks(3, on_devices(), [&](Communicator& comm) {
        std::vector<double> norms;
        both_places(comm, [&](Place& here) {
            Mlp mlp(7);
            std::vector<NamedTensor> params = mlp.named();
            for (NamedTensor& param : params) {
                const Dims shape = param.tensor.shape;
                Numbers values = numbers_of(param.tensor);
                for (double& value : values) value += comm.rank();  // rank 0's count
                param.tensor = here.put(values, shape);
                if (!here.is_device()) continue;
                here.api().record(here.stream())->wait(soon());
            }
            const auto tp = std::make_shared<TensorParallel>(mesh_of(comm), params, Mlp::rules(),
                                                             TpOptions{.sequence_parallel = true});
            const auto optimizer = optimizer_of(tp, [](std::vector<OptimizerParam> all, const auto& copy) {
                return std::make_shared<Adam>(std::move(all), AdamOptions{.lr = 0.02}, copy);
            });
            if (here.is_device()) {
                tp->set_stream(here.stream());
                optimizer->set_stream(here.stream());
            }
            std::vector<Numbers> results;
            for (int step = 0; step < 2; ++step) {
                tp->zero_grad();
                for (size_t p = 0; p < tp->params(); ++p) here.write(tp->grad(p), of_rank(comm, tp->slice_shape(p)));
                EXPECT_THROW(optimizer->step(), Error) << "before the sum";
                tp->sum_grads(nullptr);
                norms.push_back(optimizer->clip_grad_norm(1e9, 2));
                optimizer->step();
                for (size_t p = 0; p < tp->params(); ++p) {
                    results.push_back(here.get(tp->slice(p)));
                    results.push_back(here.get(tp->grad(p)));
                }
            }
            return results;
        });
        for (size_t step = 0; step < 2; ++step) EXPECT_NEAR(norms[2 + step], norms[step], 1e-12);
    }));
}

TEST_F(TpOnDevice, ARankWithoutMemoryForItsSlicesIsNamed) {
    constexpr int64_t row = 1 << 20;
    simulated_cuda_capacity(row * 3 / 2);
    const Outcomes outcomes = run_ranks(2, on_devices(), [&](Communicator& comm) {
        const NamedTensor param{"w", {nullptr, Dims{3, row}, DType::u8, *comm.device()}};  // rank 0 gets two rows
        const TpRule rule{"w", TpStyle::column, 0, {}};
        const TensorParallel tp(mesh_of(comm), {&param, 1}, {&rule, 1}, {});
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::no_memory) << outcome->what();
    }
    EXPECT_THAT(outcomes[1]->what(), HasSubstr("rank 0"));
}

// --- the vocabulary

struct Embedding {
    int64_t words;
    TpStyle style;
    DType dtype;
};

TEST_P(TpOnDevices, EmbedAsTheCpuDoes) {
    simulated_cuda_delay(100, 8);
    constexpr int64_t features = 5;
    expect_all_well(run_ranks(GetParam(), on_devices(), [&](Communicator& comm) {
        for (const Embedding& one :
             {Embedding{13, TpStyle::vocabulary, DType::f64}, Embedding{13, TpStyle::vocabulary, DType::bf16},
              Embedding{2, TpStyle::vocabulary, DType::f32}, Embedding{5, TpStyle::replicate, DType::f16}}) {
            const Dims whole{2, 6, features};
            std::vector<int64_t> wide;
            for (int64_t i = 0; i < 12; ++i) wide.push_back(i * i % one.words);
            const std::vector<int32_t> narrow(wide.begin(), wide.end());
            for (const int dim : {-1, 0, 1, 2}) {
                SCOPED_TRACE(::testing::Message() << one.words << " " << name_of(one.dtype) << " along " << dim);
                const Dims own = dim < 0 ? whole : part_shape(whole, dim, comm.world_size(), comm.rank());
                both_places(comm, [&](Place& here) {
                    const Dims shape{one.words, features};
                    const NamedTensor param{
                        "tok.weight",
                        here.put(random_numbers(1, static_cast<size_t>(shape.product())), shape, one.dtype)};
                    if (here.is_device()) here.api().record(here.stream())->wait(soon());
                    const TpRule rule{"tok", one.style, 0, {}};
                    TensorParallel tp(mesh_of(comm), {&param, 1}, {&rule, 1}, {});
                    const Tensor ids = dim % 2 == 0 ? here.put(wide, Dims{2, 6}, DType::i64)
                                                    : here.put(narrow, Dims{2, 6}, DType::i32);
                    const Tensor out = here.room(own, one.dtype);
                    WorkPtr work;
                    embed(tp, 0, ids, out, dim, here.stream(), dim == 0 ? &work : nullptr);
                    if (work) work->order(here.stream(), soon());
                    const Numbers slopes =
                        dim < 0 ? random_numbers(9, static_cast<size_t>(own.product())) : of_rank(comm, own);
                    const Tensor grad = here.put(slopes, own, one.dtype);
                    const Dims slice = tp.slice_shape(0);
                    const Tensor sum = here.put(Numbers(static_cast<size_t>(slice.product()), 1), slice, one.dtype);
                    embed_backward(tp, 0, ids, grad, dim, sum, here.stream(), nullptr);
                    return std::vector{here.get(out), here.get(sum)};
                });
            }
        }
    }));
}

struct Loss {
    Numbers loss;
    Numbers grad;
};

struct Rows {
    int64_t vocabulary = 7;
    DType dtype = DType::f64;
    bool weighted = false;
    double smoothing = 0;
    LossReduction reduction = LossReduction::mean;
    std::vector<int64_t> targets;
};

Loss loss_of(TensorParallel& tp, Place& here, const Rows& rows, const std::shared_ptr<Communicator>& data = {}) {
    const Communicator& comm = *tp.comm();
    const auto count = static_cast<int64_t>(rows.targets.size());
    const Dims whole{count, rows.vocabulary};
    const Dims own = part_shape(whole, 1, comm.world_size(), comm.rank());
    const Numbers all = random_numbers(3, static_cast<size_t>(whole.product()));
    const Tensor logits = here.put(part_of(all, whole, 1, comm.world_size(), comm.rank()), own, rows.dtype);
    const Tensor targets = here.put(rows.targets, Dims{count}, DType::i64);
    const bool is_double = rows.dtype == DType::f64;
    const Tensor loss =
        here.room(rows.reduction == LossReduction::none ? Dims{count} : Dims{}, is_double ? DType::f64 : DType::f32);
    CrossEntropyOptions options;
    options.vocabulary = rows.vocabulary;
    options.label_smoothing = rows.smoothing;
    options.reduction = rows.reduction;
    options.grad_scale = 2;
    options.data_ranks = data;
    if (rows.weighted) {
        Numbers weights = random_numbers(4, static_cast<size_t>(rows.vocabulary));
        for (double& weight : weights) weight += 1;
        options.class_weights = here.put(weights, Dims{rows.vocabulary}, is_double ? DType::f32 : DType::f64);
    }
    WorkPtr work;
    cross_entropy(tp, logits, targets, options, loss, &logits, here.stream(), &work);  // in place
    work->order(here.stream(), soon());
    Loss result{here.get(loss), here.get(logits)};
    work->wait(soon());
    return result;
}

// Sums over a row are added up in double in another order than on the CPU, and rounded once more.
void expect_near(const Numbers& found, const Numbers& expected, double tolerance) {
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
        if (std::isnan(expected[i]))
            EXPECT_TRUE(std::isnan(found[i])) << i;
        else
            EXPECT_NEAR(found[i], expected[i], tolerance * std::max(1.0, std::abs(expected[i]))) << i;
    }
}

void expect_near_cpu(Communicator& comm, TensorParallel& tp, const Rows& rows, double tolerance,
                     const std::shared_ptr<Communicator>& data = {}) {
    Place cpu;
    Place device(comm.device());
    const Loss expected = loss_of(tp, cpu, rows, data);
    const Loss found = loss_of(tp, device, rows, data);
    expect_near(found.loss, expected.loss, tolerance);
    expect_near(found.grad, expected.grad, tolerance);
    if (std::isnan(found.loss.empty() ? 0 : found.loss[0])) return;
    const Loss again = loss_of(tp, device, rows, data);
    EXPECT_EQ(again.loss, found.loss);
    EXPECT_EQ(again.grad, found.grad);
}

TEST_P(TpOnDevices, ComputeCrossEntropyAsTheCpuDoes) {
    simulated_cuda_delay(100, 9);
    expect_all_well(run_ranks(GetParam(), on_devices(), [&](Communicator& comm) {
        TensorParallel tp = any_model(comm);
        for (const auto& [dtype, tolerance] : {std::pair{DType::f64, 1e-13}, std::pair{DType::f32, 1e-6}}) {
            for (const int64_t vocabulary : {700, 2, 1}) {  // of 2 and of 1, some ranks have nothing
                for (const bool weighted : {false, true}) {
                    for (const double smoothing : {0.0, 0.3}) {
                        for (const auto reduction : {LossReduction::none, LossReduction::mean, LossReduction::sum}) {
                            SCOPED_TRACE(::testing::Message()
                                         << name_of(dtype) << " " << vocabulary << " " << weighted << " " << smoothing
                                         << " " << static_cast<int>(reduction));
                            const Rows rows{vocabulary, dtype,     weighted,
                                            smoothing,  reduction, {0, vocabulary - 1, -100, vocabulary / 2}};
                            expect_near_cpu(comm, tp, rows, tolerance);
                        }
                    }
                }
            }
        }
        expect_near_cpu(comm, tp, {.dtype = DType::bf16, .targets = {1, 6}}, 1e-2);  // a gradient's last bit
        expect_near_cpu(comm, tp, {.dtype = DType::f16, .targets = {1, 6}}, 1e-3);
        expect_near_cpu(comm, tp, {.targets = {-100, -100}}, 0);
        expect_near_cpu(comm, tp, {.targets = {}}, 0);
    }));
}

TEST_F(TpOnDevice, RowsOfSeveralGroupsHaveOneMean) {
    expect_all_well(run_ranks(4, on_devices(), [&](Communicator& comm) {
        const DeviceMesh mesh(comm, MeshShape({"dp", "tp"}, {2, 2}));
        const DeviceMesh tp_mesh = mesh.slice(std::vector<std::string>{"tp"});
        static Numbers weight{1, 2};
        const NamedTensor param{"w", tensor_of_shape(weight, Dims{2})};
        TensorParallel tp(tp_mesh, {&param, 1}, {}, {});
        const std::vector<int64_t> targets =
            mesh.coordinate(0) == 0 ? std::vector<int64_t>{1, 2, -100} : std::vector<int64_t>{6, 3};
        expect_near_cpu(comm, tp, {.targets = targets}, 1e-13, mesh.comm(0));
    }));
}

// No call waits for the device, so the communicator fails once the device is done.
void expect_failure(const std::function<void(TensorParallel&, Place&, WorkPtr*)>& call, const std::string& words) {
    const Outcomes outcomes = run_ranks(2, on_devices(), [&](Communicator& comm) {
        Place here(comm.device());
        const NamedTensor param{"tok", here.room(Dims{4, 2})};
        const TpRule rule{"tok", TpStyle::vocabulary, 0, {}};
        TensorParallel tp(mesh_of(comm), {&param, 1}, {&rule, 1}, {});
        WorkPtr work;
        call(tp, here, comm.rank() == 0 ? &work : nullptr);
        if (work) work->wait(soon());
        wait_until([&] { return tp.comm()->error().has_value(); }, soon(), "the error");
        throw Error(*tp.comm()->error());
    });
    std::string all;
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        all += std::string(outcome->what()) + "\n";
    }
    EXPECT_THAT(all, HasSubstr(words));
}

TEST_F(TpOnDevice, AnIdOutsideOfTheVocabularyEndsTheCommunicator) {
    expect_failure(
        [](TensorParallel& tp, Place& here, WorkPtr* work) {
            const Tensor ids = here.put(std::vector<int64_t>{3, 4}, Dims{2}, DType::i64);
            embed(tp, 0, ids, here.room(Dims{2, 2}), -1, here.stream(), work);
        },
        "an id is outside of the vocabulary of \"tok\", which has the ids 0 to 3");
}

TEST_F(TpOnDevice, ATargetThatIsNoClassEndsTheCommunicator) {
    expect_failure(
        [](TensorParallel& tp, Place& here, WorkPtr* work) {
            const Tensor targets = here.put(std::vector<int64_t>{-1, 2}, Dims{2}, DType::i64);
            CrossEntropyOptions options;
            options.vocabulary = 4;
            cross_entropy(tp, here.room(Dims{2, 2}), targets, options, here.room(Dims{}), nullptr, here.stream(), work);
        },
        "a target is neither a class, 0 to 3, nor ignore_index -100");
}

}  // namespace
}  // namespace tsr
