// Where a process finds the job token, and what it refuses to trust.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/fd.hpp"
#include "launch/processes.hpp"
#include "patience.hpp"
#include "soon.hpp"
#include "store/server.hpp"
#include "store/token.hpp"
#include "stores.hpp"

namespace tsr {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::TemporaryDirectory;

// Sets environment variables for one test and puts back what was there.
class TokenTest : public ::testing::Test {
   protected:
    TokenTest() {
        for (const char* name : {"TESSERA_TOKEN", "TESSERA_TOKEN_FD", "TESSERA_TOKEN_FILE"}) set(name, "");
        set("XDG_RUNTIME_DIR", directory_.path().string());
        ::chmod(directory_.path().c_str(), 0700);
    }
    ~TokenTest() override {
        for (const auto& [name, value] : former_) {
            if (value) {
                ::setenv(name.c_str(), value->c_str(), 1);
            } else {
                ::unsetenv(name.c_str());
            }
        }
    }
    void set(const std::string& name, const std::string& value) {
        const char* old = std::getenv(name.c_str());
        former_.try_emplace(name, old == nullptr ? std::nullopt : std::optional<std::string>(old));
        ::setenv(name.c_str(), value.c_str(), 1);
    }
    std::string file(const std::string& name, const std::string& text, mode_t mode) {
        const std::string path = directory_.path() / name;
        std::ofstream(path) << text;
        ::chmod(path.c_str(), mode);
        return path;
    }
    static Error refusal(bool loopback, const std::string& address = "tcp://10.0.0.1:5") {
        try {
            (void)find_token("", loopback, address);
        } catch (const Error& error) {
            return error;
        }
        return Error(Code::ok, "a token was found");
    }

    TemporaryDirectory directory_;
    std::map<std::string, std::optional<std::string>> former_;
    const std::string a_ = std::string(64, 'a');
    const std::string b_ = std::string(64, 'b');
    const std::string c_ = std::string(64, 'c');
};

TEST_F(TokenTest, OptionComesBeforeDescriptorBeforeFileBeforeVariable) {
    set("TESSERA_TOKEN", c_);
    EXPECT_EQ(find_token("", false, "").hex(), c_);
    set("TESSERA_TOKEN_FILE", file("b", b_ + "\n", 0600));
    EXPECT_EQ(find_token("", false, "").hex(), b_);
    const Fd fd(::open(file("a", a_, 0600).c_str(), O_RDONLY | O_CLOEXEC));
    set("TESSERA_TOKEN_FD", std::to_string(fd.get()));
    EXPECT_EQ(find_token("", false, "").hex(), a_);
    EXPECT_EQ(find_token("", false, "").hex(), a_) << "a descriptor is read from its start each time";
    EXPECT_EQ(find_token(std::string(64, 'D'), false, "").hex(), std::string(64, 'd'));
}

TEST_F(TokenTest, ClosedDescriptorFallsBackToTheFileOrSaysWhy) {
    set("TESSERA_TOKEN_FD", "987");
    const Error error = refusal(false);
    EXPECT_EQ(error.code(), Code::permission);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("TESSERA_TOKEN_FD=987"), HasSubstr("TESSERA_TOKEN_FILE")));
    set("TESSERA_TOKEN_FILE", file("b", b_, 0600));
    EXPECT_EQ(find_token("", false, "").hex(), b_);
}

TEST_F(TokenTest, FileThatOthersMayReadIsRefused) {
    set("TESSERA_TOKEN_FILE", file("open", a_, 0640));
    const Error error = refusal(true);
    EXPECT_EQ(error.code(), Code::permission);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("0640"), HasSubstr("chmod 600")));
}

TEST_F(TokenTest, FileOfAnotherUserIsRefused) {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root to give a file away";
    const std::string path = file("foreign", a_, 0600);
    ASSERT_EQ(::chown(path.c_str(), 65534, 65534), 0);
    set("TESSERA_TOKEN_FILE", path);
    EXPECT_EQ(refusal(true).code(), Code::permission);
}

TEST_F(TokenTest, MalformedTokenIsNamedByItsSourceAndNotShown) {
    set("TESSERA_TOKEN", "secret-but-short");
    const Error error = refusal(false);
    EXPECT_EQ(error.code(), Code::invalid_argument);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("TESSERA_TOKEN"), ::testing::Not(HasSubstr("secret"))));
    set("TESSERA_TOKEN", std::string(63, 'a') + "g");
    EXPECT_EQ(refusal(false).code(), Code::invalid_argument);
}

TEST_F(TokenTest, WithoutATokenARemoteStoreIsRefusedWithAdvice) {
    const Error error = refusal(false);
    EXPECT_EQ(error.code(), Code::permission);
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("tcp://10.0.0.1:5"), HasSubstr("TESSERA_TOKEN_FILE"), HasSubstr("TESSERA_INSECURE=1")));
}

TEST_F(TokenTest, AHostThatCannotBeResolvedIsToldBeforeATokenIsAskedFor) {
    const Error error = refusal(false, "tcp://no-such-host.invalid:5");
    EXPECT_EQ(error.code(), Code::io);
    EXPECT_THAT(error.what(), HasSubstr("cannot resolve host name 'no-such-host.invalid'"));
    EXPECT_EQ(testing::code_of([] { (void)StoreServer::start("no-such-host.invalid", 0, StoreOptions{}); }), Code::io);
}

TEST_F(TokenTest, OnLoopbackAllProcessesOfAUserShareOneToken) {
    std::vector<std::string> found(16);
    std::vector<std::thread> threads;
    for (std::string& token : found) threads.emplace_back([&] { token = find_token("", true, "").hex(); });
    for (std::thread& thread : threads) thread.join();
    for (const std::string& token : found) EXPECT_EQ(token, found.front());
    const std::filesystem::path own = directory_.path() / "tessera";
    struct stat info{};
    ASSERT_EQ(::stat((own / "token").c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 07777, 0600U);
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(own), {}), 1) << "no draft is left";
}

TEST_F(TokenTest, RuntimeDirectoryThatIsALinkOrOpenToOthersIsNotUsed) {
    std::filesystem::create_directory(directory_.path() / "elsewhere");
    std::filesystem::create_directory_symlink(directory_.path() / "elsewhere", directory_.path() / "tessera");
    const std::string elsewhere = runtime_directory();
    EXPECT_THAT(elsewhere, ::testing::AnyOf(fmt::format("/run/user/{}/tessera", ::geteuid()),
                                            fmt::format("/tmp/tessera-{}", ::geteuid())));
    std::filesystem::remove(directory_.path() / "tessera");
    std::filesystem::create_directory(directory_.path() / "tessera");
    ::chmod((directory_.path() / "tessera").c_str(), 0755);
    EXPECT_EQ(runtime_directory(), elsewhere);
    ::chmod((directory_.path() / "tessera").c_str(), 0700);
    EXPECT_EQ(runtime_directory(), directory_.path() / "tessera");
    ::rmdir(elsewhere.c_str());  // made by this test, unless it is in use
}

// Anybody may make a name in /tmp first.
TEST_F(TokenTest, RuntimeDirectoryOfAnotherUserIsPassedOver) {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can be two users";
    constexpr uid_t user = 64321;
    const std::string taken = fmt::format("/tmp/tessera-{}", user);
    ::mkdir(taken.c_str(), 0755);
    const std::string home = directory_.path() / "home";
    ASSERT_EQ(::mkdir(home.c_str(), 0755), 0);
    ASSERT_EQ(::chown(home.c_str(), user, static_cast<gid_t>(-1)), 0);
    ASSERT_EQ(::chmod(directory_.path().c_str(), 0755), 0);
    testing::Child child = testing::in_child({{"HOME", home}, {"XDG_RUNTIME_DIR", ""}}, [&] {
        if (::seteuid(user) != 0) throw Error(Code::internal, "seteuid");
        const std::string found = runtime_directory();
        if (::seteuid(0) != 0) throw Error(Code::internal, "seteuid");  // LeakSanitizer works for no other
        if (found != home + "/.tessera") throw Error(Code::user, found);
    });
    EXPECT_EQ(child.wait(), 0);
    ::rmdir(taken.c_str());
}

TEST_F(TokenTest, ServerAndClientMeetByTheUsersFile) {
    StoreOptions options;
    options.timeout = testing::patience(milliseconds{20000});
    const auto server = StoreServer::start("127.0.0.1", 0, options);
    EXPECT_EQ(Store::open(server->uri(), options)->add("n", 1, testing::soon()), 1);
}

TEST_F(TokenTest, RemoteServerWithoutATokenDoesNotStart) {
    EXPECT_EQ(testing::code_of([] { (void)StoreServer::start("0.0.0.0", 0, StoreOptions{}); }), Code::permission);
}

TEST_F(TokenTest, OptionsComeFromTheEnvironment) {
    set("TESSERA_INSECURE", "1");
    set("TESSERA_JOB_ID", "j7");
    set("TESSERA_EPOCH", "12");
    const StoreOptions options = StoreOptions::from_environment();
    EXPECT_TRUE(options.insecure);
    EXPECT_EQ(options.job_id, "j7");
    EXPECT_EQ(options.epoch, 12U);
    set("TESSERA_EPOCH", "-1");
    EXPECT_EQ(testing::code_of([] { (void)StoreOptions::from_environment(); }), Code::invalid_argument);
    set("TESSERA_EPOCH", "");
    set("TESSERA_INSECURE", "maybe");
    EXPECT_EQ(testing::code_of([] { (void)StoreOptions::from_environment(); }), Code::invalid_argument);
}

}  // namespace
}  // namespace tsr
