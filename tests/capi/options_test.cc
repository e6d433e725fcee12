// Options structs: their `_init`, and what struct_size means, for every one of them.
#include <sys/mman.h>
#include <unistd.h>

#include "api.hpp"

namespace {

// A caller's struct of a later version: the same fields and more behind them.
template <class O>
struct Later {
    O known;
    std::array<unsigned char, 24> more;
};

template <class O>
using Init = tsr_status (*)(O*, size_t);

template <class O>
void expect_init_is_sound(Init<O> init) {
    O options;
    std::memset(&options, 0xab, sizeof options);
    EXPECT_OK(init(&options, sizeof options));
    EXPECT_EQ(options.struct_size, sizeof options);
    O again;
    std::memset(&again, 0x5c, sizeof again);
    EXPECT_OK(init(&again, sizeof again));
    // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): the bytes are what is asked for
    EXPECT_EQ(std::memcmp(&options, &again, sizeof options), 0) << "every byte is written, padding too";

    Later<O> later;
    std::memset(&later, 0xab, sizeof later);
    EXPECT_OK(init(&later.known, sizeof later));
    EXPECT_EQ(later.known.struct_size, sizeof later);
    EXPECT_THAT(later.more, ::testing::Each(0)) << "fields that this library does not know are zero";

    std::array<unsigned char, sizeof(O)> earlier;
    earlier.fill(0xab);
    EXPECT_OK(init(reinterpret_cast<O*>(earlier.data()), sizeof(size_t) + 1));
    EXPECT_EQ(earlier[sizeof(size_t) + 1], 0xab) << "nothing is written beyond the caller's struct";

    EXPECT_FAILS(init(nullptr, sizeof(O)), TSR_E_INVALID_ARGUMENT, "NULL");
    EXPECT_FAILS(init(&options, 0), TSR_E_INVALID_ARGUMENT, "struct_size of options is 0");
}

// `use` calls a function that takes the options and returns its status.
template <class O>
void expect_struct_size_is_kept(Init<O> init, const std::function<tsr_status(const O*)>& use) {
    EXPECT_OK(use(nullptr));
    Later<O> options{};
    ASSERT_OK(init(&options.known, sizeof options.known));
    EXPECT_OK(use(&options.known));
    options.known.struct_size = sizeof options;
    EXPECT_OK(use(&options.known)) << "a larger struct with nothing new in it";
    options.more[3] = 1;
    EXPECT_FAILS(use(&options.known), TSR_E_UNSUPPORTED, "does not know");
    options.known.struct_size = sizeof(size_t);
    EXPECT_OK(use(&options.known)) << "a shorter struct: the rest are defaults";
    options.known.struct_size = 0;
    EXPECT_FAILS(use(&options.known), TSR_E_INVALID_ARGUMENT, "struct_size is 0");
}

TEST(Options, InitWritesDefaultsIntoStructsOfAnySize) {
    expect_init_is_sound<tsr_store_options>(tsr_store_options_init);
    expect_init_is_sound<tsr_comm_options>(tsr_comm_options_init);
    expect_init_is_sound<tsr_ddp_options>(tsr_ddp_options_init);
    expect_init_is_sound<tsr_sgd_options>(tsr_sgd_options_init);
    expect_init_is_sound<tsr_adam_options>(tsr_adam_options_init);
    expect_init_is_sound<tsr_adamw_options>(tsr_adamw_options_init);
    expect_init_is_sound<tsr_loss_scale_options>(tsr_loss_scale_options_init);
    expect_init_is_sound<tsr_adagrad_options>(tsr_adagrad_options_init);
    expect_init_is_sound<tsr_lion_options>(tsr_lion_options_init);
    expect_init_is_sound<tsr_lamb_options>(tsr_lamb_options_init);
    expect_init_is_sound<tsr_sampler_options>(tsr_sampler_options_init);
    expect_init_is_sound<tsr_saver_options>(tsr_saver_options_init);
    expect_init_is_sound<tsr_load_options>(tsr_load_options_init);
    expect_init_is_sound<tsr_export_options>(tsr_export_options_init);
}

TEST(Options, DocumentedDefaults) {
    tsr_ddp_options ddp;
    ASSERT_OK(tsr_ddp_options_init(&ddp, sizeof ddp));
    EXPECT_EQ(ddp.bucket_bytes, size_t{25} << 20);
    EXPECT_EQ(ddp.first_bucket_bytes, size_t{1} << 20);
    EXPECT_EQ(ddp.op, TSR_REDUCE_AVG);
    EXPECT_EQ(ddp.pre_divide, 1);
    EXPECT_EQ(ddp.find_unused + ddp.static_graph + ddp.rebuild_buckets + ddp.reduce_dtype, 0);
    EXPECT_EQ(ddp.hook, TSR_DDP_HOOK_ALL_REDUCE);
    EXPECT_EQ(ddp.powersgd_rank, 1);
    EXPECT_EQ(ddp.powersgd_start_step, 1000);
    EXPECT_EQ(ddp.join, TSR_DDP_JOIN_OFF);
    tsr_adamw_options adamw;
    ASSERT_OK(tsr_adamw_options_init(&adamw, sizeof adamw));
    EXPECT_EQ(adamw.lr, 0.001);
    EXPECT_EQ(adamw.beta1, 0.9);
    EXPECT_EQ(adamw.beta2, 0.999);
    EXPECT_EQ(adamw.eps, 1e-8);
    EXPECT_EQ(adamw.weight_decay, 0.01);
    tsr_adam_options adam;
    ASSERT_OK(tsr_adam_options_init(&adam, sizeof adam));
    EXPECT_EQ(adam.weight_decay, 0);
    tsr_adagrad_options adagrad;
    ASSERT_OK(tsr_adagrad_options_init(&adagrad, sizeof adagrad));
    EXPECT_EQ(adagrad.lr, 0.01);
    EXPECT_EQ(adagrad.eps, 1e-10);
    EXPECT_EQ(adagrad.lr_decay + adagrad.weight_decay + adagrad.initial_accumulator_value, 0);
    tsr_lion_options lion;
    ASSERT_OK(tsr_lion_options_init(&lion, sizeof lion));
    EXPECT_EQ(lion.lr, 0.0001);
    EXPECT_EQ(lion.beta1, 0.9);
    EXPECT_EQ(lion.beta2, 0.99);
    EXPECT_EQ(lion.weight_decay, 0);
    tsr_lamb_options lamb;
    ASSERT_OK(tsr_lamb_options_init(&lamb, sizeof lamb));
    EXPECT_EQ(lamb.lr, 0.001);
    EXPECT_EQ(lamb.beta1, 0.9);
    EXPECT_EQ(lamb.beta2, 0.999);
    EXPECT_EQ(lamb.eps, 1e-8);
    EXPECT_EQ(lamb.weight_decay, 0);
    EXPECT_EQ(lamb.max_coeff, 10);
    EXPECT_EQ(lamb.min_coeff, 0.01);
    EXPECT_EQ(lamb.bias_correction, 1);
    tsr_sampler_options sampler;
    ASSERT_OK(tsr_sampler_options_init(&sampler, sizeof sampler));
    EXPECT_EQ(sampler.shuffle, 1);
    EXPECT_EQ(sampler.drop_last, 0);
    EXPECT_EQ(sampler.seed, 0U);
}

class OptionsInUse : public ::testing::Test {
   protected:
    api::Owned<tsr_comm> comm_ = api::alone();
    api::Array<float> value_{{4}, 1.0F};
    api::Array<float> grad_{{4}, 1.0F};
    tsr_param param_{"w", value_.tensor()};
    tsr_tensor grad_tensor_ = grad_.tensor();
};

TEST_F(OptionsInUse, StructSizeIsKept) {
    expect_struct_size_is_kept<tsr_sampler_options>(tsr_sampler_options_init, [&](const auto* o) {
        api::Owned<tsr_sampler> out;
        return tsr_sampler_create(comm_, 10, o, out.out());
    });
    expect_struct_size_is_kept<tsr_ddp_options>(tsr_ddp_options_init, [&](const auto* o) {
        api::Owned<tsr_ddp> out;
        return tsr_ddp_create(comm_, &param_, 1, o, out.out());
    });
    expect_struct_size_is_kept<tsr_sgd_options>(tsr_sgd_options_init, [&](const auto* o) {
        api::Owned<tsr_optimizer> out;
        return tsr_sgd_create(&param_, &grad_tensor_, 1, o, out.out());
    });
    expect_struct_size_is_kept<tsr_adam_options>(tsr_adam_options_init, [&](const auto* o) {
        api::Owned<tsr_optimizer> out;
        return tsr_adam_create(&param_, &grad_tensor_, 1, o, out.out());
    });
    expect_struct_size_is_kept<tsr_adamw_options>(tsr_adamw_options_init, [&](const auto* o) {
        api::Owned<tsr_optimizer> out;
        return tsr_adamw_create(&param_, &grad_tensor_, 1, o, out.out());
    });
    expect_struct_size_is_kept<tsr_adagrad_options>(tsr_adagrad_options_init, [&](const auto* o) {
        api::Owned<tsr_optimizer> out;
        return tsr_adagrad_create(&param_, &grad_tensor_, 1, o, out.out());
    });
    expect_struct_size_is_kept<tsr_lion_options>(tsr_lion_options_init, [&](const auto* o) {
        api::Owned<tsr_optimizer> out;
        return tsr_lion_create(&param_, &grad_tensor_, 1, o, out.out());
    });
    expect_struct_size_is_kept<tsr_lamb_options>(tsr_lamb_options_init, [&](const auto* o) {
        api::Owned<tsr_optimizer> out;
        return tsr_lamb_create(&param_, &grad_tensor_, 1, o, out.out());
    });
    expect_struct_size_is_kept<tsr_comm_options>(tsr_comm_options_init, [&](const auto* o) {
        api::Owned<tsr_comm> out;
        return tsr_comm_from_env(o, out.out());
    });
    expect_struct_size_is_kept<tsr_saver_options>(tsr_saver_options_init, [&](const auto* o) {
        const api::TemporaryDirectory root;
        api::Owned<tsr_saver> out;
        return tsr_saver_create(comm_, root.path().c_str(), o, out.out());
    });
}

TEST_F(OptionsInUse, FlagsAreZeroOrOne) {
    tsr_sampler_options options;
    ASSERT_OK(tsr_sampler_options_init(&options, sizeof options));
    options.shuffle = 2;
    api::Owned<tsr_sampler> sampler;
    EXPECT_FAILS(tsr_sampler_create(comm_, 10, &options, sampler.out()), TSR_E_INVALID_ARGUMENT, "shuffle is 2");
}

// Memory ends where the struct ends, as it may on a heap: nothing beyond a struct is looked at for its size alone.
TEST_F(OptionsInUse, ASizeThatNoStructHasIsRefused) {
    const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    void* pages = ::mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(pages, MAP_FAILED);
    auto* begin = static_cast<std::byte*>(pages);
    ASSERT_EQ(::mprotect(begin + page, page, PROT_NONE), 0);
    auto* options = reinterpret_cast<tsr_saver_options*>(begin + page - sizeof(tsr_saver_options));
    const api::TemporaryDirectory root;
    const std::string path = root.path().string();
    for (const size_t size : {size_t{0}, size_t{1}, size_t{7}, size_t{4097}, size_t{UINT32_MAX}, SIZE_MAX}) {
        EXPECT_FAILS(tsr_saver_options_init(options, size), TSR_E_INVALID_ARGUMENT, "struct_size");
        options->struct_size = size;
        api::Owned<tsr_saver> saver;
        EXPECT_FAILS(tsr_saver_create(nullptr, path.c_str(), options, saver.out()), TSR_E_INVALID_ARGUMENT,
                     std::to_string(size));
    }
    ::munmap(pages, 2 * page);
}

}  // namespace
