// What the server does about the directory of its tier on disk.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <boost/asio/io_context.hpp>
#include <filesystem>
#include <fstream>

#include "kernels/core/status.h"
#include "services/kvstore/service.h"
#include "services/kvstore/spill_open.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

class ServiceSpillTest : public testing::Test {
 protected:
  ServiceSpillTest()
      : directory_(fs::temp_directory_path() /
                   ("certkv-service-spill-test-" + std::to_string(getpid()))) {
    fs::remove_all(directory_);
    fs::create_directories(directory_);
    config_.fd_socket = directory_ / "fd.sock";
    config_.spill_directory = directory_ / "blocks";
  }
  ~ServiceSpillTest() override { fs::remove_all(directory_); }

  absl::StatusOr<std::unique_ptr<KvStoreServer>> Create() {
    return KvStoreServer::Create(config_, RealClock(), &io_context_);
  }

  const fs::path directory_;
  KvStoreConfig config_;
  boost::asio::io_context io_context_;
};

TEST_F(ServiceSpillTest, MakesTheDirectoryForItselfAlone) {
  ASSERT_TRUE(Create().ok());
  EXPECT_EQ(fs::status(config_.spill_directory).permissions(), fs::perms::owner_all);
  EXPECT_TRUE(Create().ok()) << "the first one has let go of it";
}

TEST_F(ServiceSpillTest, DoesNotStartOnADirectoryOfSomebodyElse) {
  fs::create_directories(config_.spill_directory);
  std::ofstream(config_.spill_directory + "/photo.jpg") << "x";
  const auto server = Create();
  EXPECT_EQ(ReasonOf(server.status()), "SPILL_FOREIGN");
  EXPECT_THAT(std::string(server.status().message()), HasSubstr("spill_directory"));
}

TEST_F(ServiceSpillTest, TwoStoresDoNotShareADirectory) {
  const auto first = Create();
  ASSERT_TRUE(first.ok());
  config_.fd_socket += "2";
  EXPECT_EQ(ReasonOf(Create().status()), "SPILL_IN_USE");
}

TEST_F(ServiceSpillTest, GoesOnFromMemoryWhenTheDatabaseIsDamaged) {
  ASSERT_TRUE(Create().ok());
  for (const auto& file : fs::directory_iterator(config_.spill_directory)) {
    if (file.path().filename().string().rfind("MANIFEST", 0) == 0) fs::resize_file(file.path(), 3);
  }
  EXPECT_TRUE(Create().ok());
  const auto tier = kvstore::OpenSpill(config_, RealClock());
  ASSERT_TRUE(tier.ok()) << tier.status();
  EXPECT_FALSE((*tier)->CanWrite());
  EXPECT_NE((*tier)->GetStats().error, "");
}

TEST_F(ServiceSpillTest, GoesOnFromMemoryWhenTheDirectoryCannotBeMade) {
  std::ofstream(directory_ / "file") << "x";
  config_.spill_directory = directory_ / "file" / "blocks";
  EXPECT_TRUE(Create().ok());
}

TEST_F(ServiceSpillTest, IsOffByDefault) {
  const auto tier = kvstore::OpenSpill(KvStoreConfig{}, RealClock());
  ASSERT_TRUE(tier.ok());
  EXPECT_EQ(*tier, nullptr);
}

}  // namespace
}  // namespace certkv
