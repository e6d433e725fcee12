// How what is written at any offset becomes the parts of an object. Whole saves into storages are in tests/capi.
#include "checkpoint/io/part_writer.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/error.hpp"

namespace tsr {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Bytes = std::vector<std::byte>;

constexpr int64_t part = min_part_bytes;

// Keeps what is finished; notes each part that comes.
class OneObject final : public Storage {
   public:
    bool parts_in_any_order() const override { return true; }
    bool puts_if_absent() const override { return false; }
    int64_t part_bytes() const override { return part; }
    std::optional<FileStatus> status(const std::string&) override { return std::nullopt; }
    std::unique_ptr<Object> open(const std::string&) override { return nullptr; }
    bool put(const std::string&, std::span<const std::byte> data, PutMode) override {
        if (fails) throw Error(Code::user, "the store burned down").with_native(NativeDomain::user, 77);
        object.assign(data.begin(), data.end());
        return true;
    }
    std::unique_ptr<Upload> begin(const std::string&, int64_t size) override {
        announced = size;
        return std::make_unique<Parts>(*this);
    }
    void list(const std::string&, std::vector<std::string>&) override {}
    void remove(const std::string&) override {}
    void remove_directory(const std::string&) override {}

    Bytes object;
    std::vector<int64_t> order;  // of the parts that came
    int64_t announced = -1;
    int dropped = 0;
    bool fails = false;

   private:
    class Parts final : public Upload {
       public:
        explicit Parts(OneObject& to) : to_(to) {}
        ~Parts() override { ++to_.dropped; }
        void part(int64_t index, int64_t offset, std::span<const std::byte> data) override {
            const std::lock_guard lock(mutex_);
            to_.order.push_back(index);
            parts_[offset].assign(data.begin(), data.end());
        }
        void finish() override {
            for (const auto& [offset, data] : parts_) {
                if (offset != static_cast<int64_t>(to_.object.size())) throw std::runtime_error("a hole");
                to_.object.insert(to_.object.end(), data.begin(), data.end());
            }
        }

       private:
        OneObject& to_;
        std::mutex mutex_;
        std::map<int64_t, Bytes> parts_;
    };
};

Bytes pattern(int64_t size) {
    Bytes bytes(static_cast<size_t>(size));
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 31 / 7);
    return bytes;
}

std::span<const std::byte> range(const Bytes& bytes, int64_t begin, int64_t end) {
    return std::span(bytes).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
}

TEST(PartWriter, MakesPartsNoSmallerThanTheyMayBeAndNoMoreThanTenThousand) {
    EXPECT_EQ(part_size_for(0, default_part_bytes), default_part_bytes);
    EXPECT_EQ(part_size_for(max_parts * default_part_bytes, default_part_bytes), default_part_bytes);
    const int64_t terabytes = int64_t{4} << 40;
    const int64_t size = part_size_for(terabytes, default_part_bytes);
    EXPECT_GT(size, default_part_bytes);
    EXPECT_LE((terabytes + size - 1) / size, max_parts);
}

TEST(PartWriter, PutsWholeWhatFitsIntoOnePart) {
    for (const int64_t size : {int64_t{0}, int64_t{1}, part - 1, part}) {
        OneObject storage;
        PartWriter writer(storage, "k");
        const Bytes bytes = pattern(size);
        writer.write(bytes, 0);
        EXPECT_TRUE(writer.finish(size));
        EXPECT_EQ(storage.object, bytes);
        EXPECT_EQ(storage.announced, -1) << "no upload was begun";
    }
}

TEST(PartWriter, SendsPartsInOrderWhenBytesComeInOrderThoughNobodyToldHowMany) {
    OneObject storage;
    PartWriter writer(storage, "k");
    const Bytes bytes = pattern(3 * part + 5);
    for (int64_t at = 0; at < static_cast<int64_t>(bytes.size()); at += 10000) {
        writer.write(range(bytes, at, std::min<int64_t>(at + 10000, static_cast<int64_t>(bytes.size()))), at);
    }
    EXPECT_TRUE(writer.finish(static_cast<int64_t>(bytes.size())));
    EXPECT_THAT(storage.order, ElementsAre(0, 1, 2, 3));
    EXPECT_EQ(storage.object, bytes);
}

TEST(PartWriter, LetsTheFirstPartWaitForAHeaderThatComesLast) {
    OneObject storage;
    PartWriter writer(storage, "k");
    const Bytes bytes = pattern(3 * part);
    writer.expect(3 * part);
    writer.write(range(bytes, 4096, 3 * part), 4096);
    EXPECT_THAT(storage.order, ElementsAre(1, 2));
    writer.write(range(bytes, 0, 4096), 0);
    EXPECT_THAT(storage.order, ElementsAre(1, 2, 0));
    EXPECT_TRUE(writer.finish(3 * part));
    EXPECT_EQ(storage.object, bytes);
    EXPECT_EQ(storage.announced, 3 * part);
}

TEST(PartWriter, TakesBytesFromManyThreads) {
    OneObject storage;
    PartWriter writer(storage, "k");
    const auto size = 20 * part + 123;
    const Bytes bytes = pattern(size);
    writer.expect(size);
    std::vector<std::pair<int64_t, int64_t>> pieces;
    std::mt19937 random(7);
    for (int64_t at = 0; at < size;) {
        const int64_t end = std::min(size, at + 1 + static_cast<int64_t>(random() % (2 * part)));
        pieces.emplace_back(at, end);
        at = end;
    }
    std::shuffle(pieces.begin(), pieces.end(), random);
    std::atomic<size_t> next{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&] {
            for (size_t piece = next++; piece < pieces.size(); piece = next++) {
                writer.write(range(bytes, pieces[piece].first, pieces[piece].second), pieces[piece].first);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(writer.finish(size));
    EXPECT_EQ(storage.object, bytes);
}

TEST(PartWriter, FinishesNothingWithAHole) {
    for (const int64_t hole : {int64_t{5}, part + 5, 3 * part - 5}) {
        OneObject storage;
        {
            PartWriter writer(storage, "k");
            const Bytes bytes = pattern(3 * part);
            writer.expect(3 * part);
            writer.write(range(bytes, 0, hole), 0);
            writer.write(range(bytes, hole + 1, 3 * part), hole + 1);
            EXPECT_FALSE(writer.finish(3 * part));
        }
        EXPECT_THAT(storage.object, IsEmpty());
        EXPECT_EQ(storage.dropped, 1) << "what was begun is dropped";
    }
}

TEST(StorageFiles, TellsTheStoragesErrorAsItIs) {
    const auto storage = std::make_shared<OneObject>();
    const auto files = storage_files(storage);
    storage->fails = true;
    try {
        replace_text(*files, "a/b", "text", "tag");
        FAIL() << "it should have thrown";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::user);
        EXPECT_EQ(error.record()->native_code, 77);
        EXPECT_THAT(error.what(), HasSubstr("cannot write a/b: the store burned down"));
    }
    EXPECT_EQ(os_error("x", EIO).code(), Code::io) << "an errno is an errno";
}

}  // namespace
}  // namespace tsr
