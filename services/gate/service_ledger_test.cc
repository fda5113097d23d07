// LedgerRunner against a redis-server that asks for a password.
#include "services/gate/service_ledger.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/status.h"
#include "tests/support/redis_server.h"

namespace certkv::gate {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const std::string& Password() {
  static const std::string password(40, 'p');
  return password;
}

class LedgerPasswordTest : public ::testing::Test {
 protected:
  LedgerPasswordTest() {
    config_.ledger_redis = "unix:" + server_.socket();
    config_.ledger_timeout_ms = 10'000;
    config_.ledger_password_file = absl::StrCat(testing::TempDir(), "/ledger-password-", getpid());
  }
  ~LedgerPasswordTest() override { unlink(config_.ledger_password_file.c_str()); }

  void Write(const std::string& text, mode_t mode = 0600) {
    const std::string& path = config_.ledger_password_file;
    unlink(path.c_str());
    std::ofstream(path) << text << "\n";
    ASSERT_EQ(chmod(path.c_str(), mode), 0);
  }
  // What the ledger says to a runner of the config.
  absl::Status Ask() {
    const auto runner = LedgerRunner::Create(config_);
    if (!runner.ok()) return runner.status();
    absl::Status status;
    absl::Notification done;
    (*runner)->Run([&] {
      status = (*runner)->ledger()->Load("requests/r").status();
      done.Notify();
    });
    done.WaitForNotification();
    return status;
  }

  RedisServer server_{/*keeps_data=*/false, {"--requirepass", Password()}};
  GateConfig config_;
};

TEST_F(LedgerPasswordTest, TheFilesPasswordOpensTheLedger) {
  Write(Password());
  const absl::Status status = Ask();
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(LedgerPasswordTest, WithoutTheRightPasswordTheLedgerIsUnavailable) {
  Write(std::string(40, 'q'));
  const absl::Status wrong = Ask();
  EXPECT_EQ(ReasonOf(wrong), "LEDGER_UNAVAILABLE") << wrong;
  EXPECT_THAT(std::string(wrong.message()), HasSubstr("WRONGPASS"));
  EXPECT_THAT(std::string(wrong.message()), Not(HasSubstr(std::string(40, 'q'))));
  config_.ledger_password_file = "";
  const absl::Status none = Ask();
  EXPECT_EQ(ReasonOf(none), "LEDGER_UNAVAILABLE") << none;
  EXPECT_THAT(std::string(none.message()), HasSubstr("NOAUTH"));
}

TEST_F(LedgerPasswordTest, AFileThatOthersMayReadOrThatHoldsNoPasswordIsRefused) {
  Write(Password(), 0644);
  EXPECT_EQ(ReasonOf(Ask()), "SECRET_FILE_UNSAFE");
  Write("short");
  EXPECT_EQ(ReasonOf(Ask()), "TOKEN_FILE_INVALID");
  unlink(config_.ledger_password_file.c_str());
  EXPECT_EQ(ReasonOf(Ask()), "SECRET_FILE_UNREADABLE");
}

}  // namespace
}  // namespace certkv::gate
