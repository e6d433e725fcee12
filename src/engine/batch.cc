#include "engine/batch.hpp"

#include <fmt/core.h>

#include <string>

#include "base/error.hpp"

namespace tsr {

namespace {

constexpr int64_t most = int64_t{1} << 40;  // of each number, so that the products of two fit

[[noreturn]] void refuse(const std::string& why) { throw Error(Code::invalid_argument, why); }

void check_given(const char* name, const std::optional<int64_t>& value) {
    if (value && (*value < 1 || *value > most)) {
        refuse(fmt::format("{} is {}; it must be at least 1 and at most 2^40", name, *value));
    }
}

// 0 if the product is above `most`.
int64_t product(int64_t a, int64_t b) { return b == 0 || a > most / b ? 0 : a * b; }

std::string shown(int64_t value, const std::string& origin) {
    return origin.empty() ? std::to_string(value) : fmt::format("{} ({})", value, origin);
}

// The product with all its numbers, and the origin of those that are not given.
std::string formula(const BatchConfig& given, const BatchSizes& sizes, int ranks) {
    std::string micro;
    std::string accumulation;
    if (!given.micro) {
        micro = given.accumulation ? fmt::format("from {} / {} / {}", sizes.train, ranks, sizes.accumulation)
                                   : fmt::format("from {} / {}", sizes.train, ranks);
    }
    if (!given.accumulation) {
        accumulation = given.train && given.micro ? fmt::format("from {} / {} / {}", sizes.train, sizes.micro, ranks)
                                                  : "the default";
    }
    return fmt::format("train_micro_batch_size_per_gpu {} * gradient_accumulation_steps {} * {} data-parallel ranks",
                       shown(sizes.micro, micro), shown(sizes.accumulation, accumulation), ranks);
}

[[noreturn]] void refuse_too_large(const std::string& formula) {
    refuse(fmt::format("train_batch_size = {} is above 2^40; use smaller batches", formula));
}

void check_solved(const BatchConfig& given, const BatchSizes& sizes, int ranks) {
    const int64_t per_step = product(product(sizes.micro, sizes.accumulation), ranks);
    if (per_step == sizes.train) return;
    // What the train batch must be a multiple of; if all are given, what it must be.
    const int64_t unit = product(product(given.micro.value_or(1), given.accumulation.value_or(1)), ranks);
    if (unit == 0) refuse_too_large(formula(given, sizes, ranks));
    refuse(fmt::format("train_batch_size {} does not equal {} = {}; {}set it to {}{}", sizes.train,
                       formula(given, sizes, ranks), per_step,
                       given.micro ? "leave it out, which fits any number of ranks, or " : "",
                       given.micro && given.accumulation ? "" : "a multiple of ", unit));
}

}  // namespace

BatchSizes solve_batch(const BatchConfig& given, int ranks) {
    check_given("train_batch_size", given.train);
    check_given("train_micro_batch_size_per_gpu", given.micro);
    check_given("gradient_accumulation_steps", given.accumulation);
    if (!given.train && !given.micro) {
        refuse(
            "the configuration has neither train_batch_size nor train_micro_batch_size_per_gpu; give one of them "
            "(train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * data-parallel ranks)");
    }
    BatchSizes sizes{given.train.value_or(0), given.micro.value_or(0), given.accumulation.value_or(1)};
    if (!given.train) {
        sizes.train = product(product(sizes.micro, sizes.accumulation), ranks);
        if (sizes.train == 0) refuse_too_large(formula(given, sizes, ranks));
        return sizes;
    }
    if (given.micro && !given.accumulation) sizes.accumulation = sizes.train / sizes.micro / ranks;
    if (!given.micro) sizes.micro = sizes.train / ranks / sizes.accumulation;
    check_solved(given, sizes, ranks);
    return sizes;
}

BatchSizes with_train_batch(const BatchSizes& now, int64_t train, int ranks) {
    check_given("train_batch_size", train);
    const int64_t unit = now.micro * ranks;
    if (train % unit == 0) return {train, now.micro, train / unit};
    refuse(fmt::format(
        "train_batch_size {} is not divisible by train_micro_batch_size_per_gpu {} * {} data-parallel ranks "
        "= {}; choose a multiple of {}",
        train, now.micro, ranks, unit, unit));
}

BatchSizes with_micro_batch(const BatchSizes& now, int64_t micro, int ranks) {
    check_given("train_micro_batch_size_per_gpu", micro);
    return solve_batch({std::nullopt, micro, now.accumulation}, ranks);
}

}  // namespace tsr
