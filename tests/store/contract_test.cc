// What every store must do, run on each implementation.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "soon.hpp"
#include "store/store.hpp"
#include "stores.hpp"

namespace tsr {
namespace {

using testing::code_of;
using testing::StoreKind;

class StoreContract : public ::testing::TestWithParam<StoreKind> {
   protected:
    std::unique_ptr<testing::StoreHouse> house_ = testing::make_house(GetParam());
    std::shared_ptr<Store> store_ = house_->open();
    Deadline soon_ = testing::soon();
};

TEST_P(StoreContract, GivesBackWhatWasSet) {
    EXPECT_EQ(store_->get("a", soon_), std::nullopt);
    const std::string binary("\0\xff\n{}", 5);
    store_->set("a", binary, soon_);
    store_->set("empty", "", soon_);
    EXPECT_EQ(store_->get("a", soon_), binary);
    EXPECT_EQ(store_->get("empty", soon_), "");
    EXPECT_EQ(store_->wait("a", soon_), binary);
    store_->set("a", "second", soon_);
    EXPECT_EQ(store_->get("a", soon_), "second");
}

TEST_P(StoreContract, KeysMayHoldAnyBytes) {
    for (const std::string& key : {std::string("a/b/../c"), std::string("\0\x01", 2), std::string("ü /%2e"),
                                   std::string("."), std::string(".."), std::string(Store::max_key_bytes, 'k')}) {
        store_->set(key, key, soon_);
        EXPECT_EQ(store_->get(key, soon_), key);
    }
}

TEST_P(StoreContract, TakesTheLargestValueAndNoLarger) {
    const std::string largest(Store::max_value_bytes, 'v');
    store_->set("large", largest, soon_);
    EXPECT_EQ(store_->get("large", soon_), largest);
    EXPECT_EQ(code_of([&] { store_->set("larger", largest + "v", soon_); }), Code::invalid_argument);
    EXPECT_EQ(store_->get("larger", soon_), std::nullopt);
}

TEST_P(StoreContract, RefusesBadKeys) {
    EXPECT_EQ(code_of([&] { store_->set("", "v", soon_); }), Code::invalid_argument);
    EXPECT_EQ(code_of([&] { (void)store_->get(std::string(Store::max_key_bytes + 1, 'k'), soon_); }),
              Code::invalid_argument);
}

TEST_P(StoreContract, AddsDecimalNumbers) {
    EXPECT_EQ(store_->add("n", 5, soon_), 5);
    EXPECT_EQ(store_->add("n", -7, soon_), -2);
    EXPECT_EQ(store_->get("n", soon_), "-2");
    store_->set("n", "40", soon_);
    EXPECT_EQ(store_->add("n", 2, soon_), 42);
    store_->set("word", "4x", soon_);
    EXPECT_EQ(code_of([&] { store_->add("word", 1, soon_); }), Code::invalid_argument);
    store_->set("n", std::to_string(INT64_MAX), soon_);
    EXPECT_EQ(code_of([&] { store_->add("n", 1, soon_); }), Code::invalid_argument);
    EXPECT_EQ(store_->get("n", soon_), std::to_string(INT64_MAX));
}

TEST_P(StoreContract, ComparesAndSets) {
    EXPECT_FALSE(store_->compare_set("k", "old", "new", soon_));
    EXPECT_EQ(store_->get("k", soon_), std::nullopt);
    EXPECT_TRUE(store_->compare_set("k", std::nullopt, "first", soon_));
    EXPECT_FALSE(store_->compare_set("k", std::nullopt, "second", soon_));
    EXPECT_TRUE(store_->compare_set("k", "first", "", soon_));
    EXPECT_TRUE(store_->compare_set("k", "", "last", soon_));
    EXPECT_EQ(store_->get("k", soon_), "last");
}

TEST_P(StoreContract, ErasesOnce) {
    store_->set("k", "v", soon_);
    EXPECT_TRUE(store_->erase("k", soon_));
    EXPECT_FALSE(store_->erase("k", soon_));
    EXPECT_EQ(store_->get("k", soon_), std::nullopt);
}

TEST_P(StoreContract, WaitTimesOutAndNamesTheKey) {
    try {
        (void)store_->wait("rank/3", Deadline::in(milliseconds{30}));
        FAIL() << "the key is not there";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::timeout);
        EXPECT_NE(std::string(error.what()).find("rank/3"), std::string::npos) << error.what();
    }
    store_->set("after", "well", soon_);  // the store is usable after a wait that failed
    EXPECT_EQ(store_->wait("after", soon_), "well");
}

TEST_P(StoreContract, WaitOfASeenInterruptEnds) {
    set_interrupt([](void*) -> int32_t { return 1; }, nullptr);
    EXPECT_EQ(code_of([&] { (void)store_->wait("never", soon_); }), Code::interrupted);
    set_interrupt(nullptr, nullptr);
    store_->set("after", "well", soon_);
    EXPECT_EQ(store_->get("after", soon_), "well");
}

TEST_P(StoreContract, ManyThreadsWaitOnOneStoreWhileOthersSet) {
    constexpr int count = 16;
    std::vector<std::thread> waiters;
    std::atomic<int> seen{0};
    for (int i = 0; i < count; ++i) {
        waiters.emplace_back([&, i] {
            if (store_->wait("key" + std::to_string(i), soon_) == std::to_string(i)) ++seen;
        });
    }
    for (int i = count - 1; i >= 0; --i) store_->set("key" + std::to_string(i), std::to_string(i), soon_);
    for (std::thread& waiter : waiters) waiter.join();
    EXPECT_EQ(seen, count);
}

TEST_P(StoreContract, AddIsAtomicBetweenClients) {
    constexpr int clients = 4;
    constexpr int rounds = 50;
    std::vector<std::thread> threads;
    for (int c = 0; c < clients; ++c) {
        threads.emplace_back([&] {
            const auto own = house_->open();
            for (int i = 0; i < rounds; ++i) own->add("counter", 1, soon_);
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(store_->get("counter", soon_), std::to_string(clients * rounds));
}

TEST_P(StoreContract, OneClientOfManyWinsACompareSet) {
    std::atomic<int> winners{0};
    std::vector<std::thread> threads;
    for (int c = 0; c < 8; ++c) {
        threads.emplace_back([&, c] {
            if (house_->open()->compare_set("leader", std::nullopt, std::to_string(c), soon_)) ++winners;
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(winners, 1);
}

TEST_P(StoreContract, PrefixesKeepUsersApart) {
    const auto one = prefixed(store_, "one/");
    const auto two = prefixed(one, "two/");
    one->set("k", "1", soon_);
    two->set("k", "2", soon_);
    EXPECT_EQ(store_->get("one/k", soon_), "1");
    EXPECT_EQ(store_->get("one/two/k", soon_), "2");
    EXPECT_EQ(two->add("n", 3, soon_), 3);
    EXPECT_TRUE(one->erase("k", soon_));
    EXPECT_EQ(two->get("k", soon_), "2");
    EXPECT_EQ(two->timeout(), store_->timeout());
}

INSTANTIATE_TEST_SUITE_P(Stores, StoreContract, ::testing::ValuesIn(testing::store_kinds),
                         [](const auto& kind) { return std::string(name_of(kind.param)); });

}  // namespace
}  // namespace tsr
