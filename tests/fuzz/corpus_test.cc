// The corpus of every fuzz target, replayed as it stands and with random damage: nothing crashes, and what is refused is
// refused by a typed error.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "fuzz/targets.hpp"
#include "places.hpp"
#include "sanitized.hpp"

namespace tsr::fuzz {
namespace {

using Inputs = std::map<std::string, std::string>;  // by name

Inputs corpus_of(const std::string& name) {
    Inputs inputs;
    for (const auto& entry :
         std::filesystem::directory_iterator(tsr::testing::source_dir() + "/tests/fuzz/corpus/" + name)) {
        std::ifstream file(entry.path(), std::ios::binary);
        inputs.emplace(entry.path().filename().string(), std::string(std::istreambuf_iterator<char>(file), {}));
    }
    return inputs;
}

using Names = std::set<std::string>;

// What is taken, and what is in part. All else is refused; of what a fuzzer found (found-...) nobody says.
const std::map<std::string, std::pair<Names, Names>> expected{
    {"zip", {{"item", "python", "save", "zip64"}, {}}},
    {"pickle",
     {{"ordered", "plain-2", "plain-3", "plain-4", "plain-5", "sparse-memo"},
      {"bomb", "cycle", "deep-lists", "deep-tuples", "dict-cycle", "dotted", "eval", "huge-integer", "key-twice",
       "long-name", "metadata", "newobj-ex", "persistent", "save", "surrogate", "system"}}},
    {"archive",
     {{"expanded", "item", "made", "save", "tessera", "zip64"},
      {"count-differs", "count-overflows", "huge", "leaves-storage", "negative-offset", "no-storage", "other-file",
       "overlapping", "quantised", "stride-negative", "stride-overflows", "strides-differ"}}},
    {"metadata",
     {{"made", "tessera", "torch-2.11.0", "torch-2.15.0", "torch-2.4.1", "torch-2.7.1"},
      {"nine-dims", "other-storage", "quantised", "transform-class", "transformed"}}},
    {"safetensors", {{"empty-and-scalar", "mixed-order", "native", "two"}, {}}},
    {"manifest",
     {{"boxes", "mesh", "native", "sharded", "shards-empty", "split", "tied", "torch_dcp", "uneven", "values"}, {}}},
    {"safetensors_file", {{"none", "null-metadata", "padded", "part", "sound"}, {"every-dtype", "fp4", "nine-dims"}}},
    {"safetensors_index", {{"more", "none", "sound"}, {}}},
    {"store_request",
     {{"add", "cancel", "compare", "compare-absent", "delete", "get", "no-key", "set", "set-empty", "wait"}, {}}},
    {"store_hello", {{"answer", "sound"}, {}}},  // an answer has the form of a hello
};

class Corpus : public ::testing::TestWithParam<Target> {};

TEST_P(Corpus, WhatIsSoundIsTakenAndAllElseIsRefused) {
    Names taken;
    Names in_part;
    for (const auto& [name, input] : corpus_of(GetParam().name)) {
        if (name.starts_with("found-")) continue;
        const Outcome outcome = GetParam().run(input);
        if (outcome != Outcome::refused) (outcome == Outcome::taken ? taken : in_part).insert(name);
    }
    EXPECT_EQ(taken, expected.at(GetParam().name).first);
    EXPECT_EQ(in_part, expected.at(GetParam().name).second);
}

TEST_P(Corpus, EveryTruncationIsRefused) {
    for (const auto& [name, input] : corpus_of(GetParam().name)) {
        if (GetParam().run(input) == Outcome::refused || std::string_view(GetParam().name) == "manifest") continue;
        const size_t step = input.size() / (testing::sanitized ? 400 : 4000) + 1;
        for (size_t size = 0; size < input.size(); size += step) {
            ASSERT_EQ(GetParam().run(std::string_view(input).substr(0, size)), Outcome::refused)
                << size << " of " << input.size() << " bytes of " << name;
        }
    }
}

TEST_P(Corpus, RandomDamageNeverCrashes) {
    const uint32_t seed = 20261121;
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    std::vector<std::string> inputs;
    for (const auto& [name, input] : corpus_of(GetParam().name)) inputs.push_back(input);
    for (int i = 0; i < 6000; ++i) {
        std::string input = inputs[random() % inputs.size()];
        for (uint32_t edits = 1 + random() % 4; edits > 0 && !input.empty(); --edits) {
            const size_t at = random() % input.size();
            switch (random() % 4) {
                case 0: input[at] = static_cast<char>(input[at] ^ 1 << random() % 8); break;
                case 1: input[at] = static_cast<char>(random()); break;
                case 2: input.erase(at, 1 + random() % 8); break;
                default: input.insert(at, input.substr(random() % input.size(), random() % 32));
            }
        }
        (void)GetParam().run(input);
    }
}

INSTANTIATE_TEST_SUITE_P(Fuzz, Corpus, ::testing::ValuesIn(targets),
                         [](const auto& one) { return std::string(one.param.name); });

}  // namespace
}  // namespace tsr::fuzz
